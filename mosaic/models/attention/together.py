"""All at once: projections by chunks of tokens under one norm, one attention over all queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mosaic.models.attention import Way
from mosaic.models.attention.projections import attend, project_out, project_rows

if TYPE_CHECKING:
    from mosaic.models.step_graph import StepGraph
    from mosaic.registrar.graph import Buffer
    from mosaic.registrar.schemes.scheme import Bundle


class Together(Way):
    """Queries, keys and values of all heads exist whole."""

    name: ClassVar[str] = "together"

    def register(self, step: StepGraph, layer: int, norm: Buffer, matrices: dict[str, Bundle]) -> None:
        """Project, attend, add to the residual."""
        q, k, v = self.whole(step, layer, norm, matrices)
        self.projected(step, layer, q, k, v)
        project_out(step, self.attended(step, layer, q, k, v), matrices["o_proj"])

    def whole(
        self, step: StepGraph, layer: int, norm: Buffer, matrices: dict[str, Bundle]
    ) -> tuple[Buffer, Buffer, Buffer]:
        """Register the queries, keys and values of all tokens and heads."""
        g, arch, own = step.g, step.arch, step.arch.stack[layer].attention
        q, k, v = (
            g.buffer(name, (step.tokens, width), arch.dtype)
            for name, width in (("q", own.width), ("k", own.kv_width), ("v", own.kv_width))
        )
        project_rows(step, layer, norm, matrices, {"q": q, "k": k, "v": v}, "proj", "attention_in")
        return q, k, v

    def projected(self, step: StepGraph, layer: int, q: Buffer, k: Buffer, v: Buffer) -> None:
        """Register what a policy makes of a layer's queries, keys and values while they exist."""

    def attended(self, step: StepGraph, layer: int, q: Buffer, k: Buffer, v: Buffer) -> Buffer:
        """Register the attention of one layer; results replace queries."""
        return attend(step, layer, q, k, v)
