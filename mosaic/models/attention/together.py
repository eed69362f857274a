"""All at once: projections by chunks of tokens under one norm, one attention over all queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mosaic.models.attention import Way
from mosaic.models.attention.projections import attend, project_out, project_rows

if TYPE_CHECKING:
    from mosaic.models.step_graph import StepGraph
    from mosaic.registrar.graph import Buffer

__all__ = ["Together"]


class Together(Way):
    """Queries, keys and values of all heads exist whole."""

    name: ClassVar[str] = "together"

    def register(self, step: StepGraph, layer: int, norm: Buffer, matrices: dict[str, Buffer]) -> None:
        """Project, attend, add to the residual."""
        g, arch = step.g, step.arch
        heads = {"q": arch.heads, "k": arch.kv_heads, "v": arch.kv_heads}
        whole = {name: g.buffer(name, (step.tokens, n * arch.head_size), arch.dtype) for name, n in heads.items()}
        project_rows(step, layer, norm, matrices, whole, "proj", "attention_in")
        project_out(step, attend(step, whole["q"], whole["k"], whole["v"]), matrices["o_proj"])
