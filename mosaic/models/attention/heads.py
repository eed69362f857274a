"""By heads: a few key-value heads at a time write their columns of one buffer, then one output projection for all.

The result equals that of all heads at once, bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mosaic.models.attention import Way
from mosaic.models.attention.projections import (
    PROJECTION_TILE,
    attend,
    keys_and_values,
    matrices,
    project,
    project_out,
    project_rows,
)
from mosaic.models.residency import SLOTS, stored

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.step_graph import StepGraph
    from mosaic.registrar.graph import Buffer, Kind
    from mosaic.registrar.schemes.scheme import Bundle, Matrix


class Heads(Way):
    """Regions run over the dim `kv_heads`. If the hidden states are in host memory, so are the results."""

    name: ClassVar[str] = "heads"

    def serves(self, arch: Architecture) -> bool:
        """Only layers with equal numbers and sizes of heads."""
        return len({(own.heads, own.kv_heads, own.head_size) for own in (layer.attention for layer in arch.stack)}) == 1

    def dims(self, step: StepGraph) -> None:
        """Declare the number of key-value heads, which is fixed."""
        step.g.dim("kv_heads", value=step.arch.stack[0].attention.kv_heads)

    def knobs(self, step: StepGraph) -> None:
        """Declare the knob: key-value heads at a time."""
        step.g.knob("heads", over=step.g.dim("kv_heads"), tile=1)

    def begin(self, step: StepGraph) -> None:
        """If they are in host memory, declare the results of all heads: one buffer for all layers."""
        self._attended = _all_heads(step, "attended", "host") if step.on_host else None

    def matrices(self, step: StepGraph, layer: int) -> list[Matrix]:
        """Return the projections, shaped by the dim `kv_heads`."""
        return matrices(step.arch, layer, step.g.dim("kv_heads"))

    def register(self, step: StepGraph, layer: int, norm: Buffer, matrices: dict[str, Bundle]) -> None:
        """Register each group's keys and values, then its queries: in host memory by chunks, on the device whole."""
        if self._attended is None:
            self._in_place(step, layer, norm, matrices)
            return
        g, attended = step.g, self._attended
        with g.chunk("heads", over=g.dim("kv_heads"), tile=1) as group:
            k, v = keys_and_values(step, layer, norm, matrices, group)
            with g.chunk("proj", over=step.tokens, tile=PROJECTION_TILE, name="queries") as rows:
                _, h = step.normed(rows, norm, "queries_in")
                q = project(step, layer, "q", h, matrices["q_proj"])
                y = g.buffer("attended_chunk", q.shape, q.dtype, rotate=SLOTS)
                stored(g, attend(step, layer, q, k, v, y), attended)
        project_out(step, attended, matrices["o_proj"])

    def projected(self, step: StepGraph, layer: int, q: Buffer, k: Buffer, v: Buffer) -> None:
        """Register what a policy makes of the queries, keys and values of some heads while they exist."""

    def _in_place(self, step: StepGraph, layer: int, norm: Buffer, matrices: dict[str, Bundle]) -> None:
        """Project the queries of a few heads with their keys and values under one norm; results replace queries."""
        g, arch, head_size = step.g, step.arch, step.arch.stack[layer].attention.head_size
        q, attended = _all_heads(step, "q", "transient"), _all_heads(step, "attended", "transient")
        g.add_alias(attended, q)
        with g.chunk("heads", over=g.dim("kv_heads"), tile=1) as group:
            k, v = (g.buffer(name, (step.tokens, group * head_size), arch.dtype) for name in ("k", "v"))
            project_rows(step, layer, norm, matrices, {"q": q, "k": k, "v": v}, "proj", "attention_in")
            self.projected(step, layer, q, k, v)
            attend(step, layer, q, k, v, attended)
        project_out(step, attended, matrices["o_proj"])


def _all_heads(step: StepGraph, name: str, kind: Kind) -> Buffer:
    """The buffer of all heads' queries or results: one per layer, or one in host memory for all layers."""
    own = step.arch.stack[0].attention
    width = step.g.dim("kv_heads") * (own.heads // own.kv_heads) * own.head_size
    return step.g.buffer(name, (step.tokens, width), step.arch.dtype, kind=kind)
