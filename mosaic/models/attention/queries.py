"""By queries: keys and values of all heads first, then chunks of queries; the queries never exist whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mosaic.models.attention import Way
from mosaic.models.attention.projections import PROJECTION_TILE, attend, keys_and_values, project
from mosaic.registrar.schemes.scheme import product

if TYPE_CHECKING:
    from mosaic.models.step_graph import StepGraph
    from mosaic.registrar.graph import Buffer
    from mosaic.registrar.schemes.scheme import Bundle


class Queries(Way):
    """Each chunk of queries is projected, attends and is added to the residual."""

    name: ClassVar[str] = "queries"

    def register(self, step: StepGraph, layer: int, norm: Buffer, matrices: dict[str, Bundle]) -> None:
        """Register keys and values first, then the chunks of queries."""
        g = step.g
        k, v = keys_and_values(step, layer, norm, matrices, step.arch.stack[layer].attention.kv_heads)
        with g.chunk("proj", over=step.tokens, tile=PROJECTION_TILE, name="queries") as rows:
            source, h = step.normed(rows, norm, "queries_in")
            y = attend(step, layer, project(step, layer, "q", h, matrices["q_proj"]), k, v)
            product(g, y, matrices["o_proj"], onto=source, name="o_linear")
            step.hidden.keep(source)
