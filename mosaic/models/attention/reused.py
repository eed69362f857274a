"""Over kept keys, with what is kept of the attention to a prefix: fresh or kept outputs, joined with the block's own keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from mosaic.models.attention.kept import KeptTogether, extents_of
from mosaic.models.parts.reused import CHANGE, Reused, kept_outputs, kept_queries, kept_sums

if TYPE_CHECKING:
    from mosaic.models.reuse import PrefixReuse
    from mosaic.models.transformer import StepGraph
    from mosaic.registrar.graph import Buffer

__all__ = ["ReusedTogether", "Reusing"]


class Reusing:
    """The attention of layers whose outputs over a prefix are kept: registered layer by layer.

    Parameters
    ----------
    reuse
        The options.
    layers
        How many first layers reuse; 0: all.
    refreshes
        Whether requests may refresh in the step.
    """

    def __init__(self, step: StepGraph, reuse: PrefixReuse, layers: int, *, refreshes: bool) -> None:
        self._layers, self._refreshes = layers, refreshes
        self._change: Buffer | None = None
        if reuse.change is not None:
            self._change = step.g.output(CHANGE, (step.seqs,), "float32")

    def attend(self, step: StepGraph, layer: int, q: Buffer) -> Buffer:
        """Register attention to all keys, over the queries' storage."""
        g, arch, inputs = step.g, step.arch, step.inputs
        where, new = inputs["prefix"], [inputs["refreshed"]] if self._refreshes else []
        if self._change is not None and layer + 1 == (self._layers or arch.layers):
            g.add_op(
                "query_change", q, g[kept_queries().name], inputs["queries_row"], where, step.cu_seqlens, step.positions, *new,
                out=self._change, name="change", rows=arch.block,
            )  # fmt: skip
        sizes = {"layer": layer, "kv_heads": arch.kv_heads, "head_size": arch.head_size, "scale": arch.head_size**-0.5}
        fresh: tuple[Buffer, ...] = ()
        if self._refreshes:
            fresh = g.add_op(
                "prefix_attention", q, step.kv, *extents_of(step), *new, step.cu_seqlens, step.positions,
                name="prefix_attention", block=arch.block, span=step.span, keys=g.dim("keys"), parts=g.dim("parts"), **sizes,
            )  # fmt: skip
        y: Buffer = g.add_op(
            "joined_attention", q, step.kv, *extents_of(step), inputs["seen"], step.cu_seqlens, step.positions, where,
            g[kept_outputs(self._layers).name], g[kept_sums(self._layers).name], inputs["kept_row"], *fresh, *new,
            name="attention", slot=layer, rows=arch.block, block=arch.block, **sizes,
        )  # fmt: skip
        g.add_alias(y, q)
        return y


class ReusedTogether(KeptTogether):
    """All queries at once. A step that refreshes attends to the prefixes of those sequences that do."""

    name: ClassVar[str] = "together"
    by_rows: ClassVar[bool] = False  # the last layer keeps the outputs of all rows
    cuts: ClassVar[bool] = False

    def begin(self, step: StepGraph) -> None:
        """Declare what comes back of the queries."""
        policy = step.phase.cache
        assert isinstance(policy, Reused)
        self._reusing = Reusing(step, policy.reuse, 0, refreshes=policy.refreshes)

    def attended(self, step: StepGraph, layer: int, q: Buffer) -> Buffer:
        """Register the attention of one layer over the queries' storage."""
        return self._reusing.attend(step, layer, q)
