"""Over selected keys: exact layers attend as ever, sparse ones select, attend exactly, or attend to what was selected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from mosaic.models.attention.kept import KeptTogether, attend, extents_of
from mosaic.models.attention.reused import Reusing
from mosaic.models.parts.selected import Selected, index_sets, page_extrema
from mosaic.models.sparse import sets_of

if TYPE_CHECKING:
    from mosaic.models.transformer import StepGraph
    from mosaic.registrar.graph import Buffer

__all__ = ["SelectedTogether"]

SELECT: Final = "select"


class SelectedTogether(KeptTogether):
    """All queries at once. A step that selects attends for each sequence in the way that it is at."""

    name: ClassVar[str] = "together"
    by_rows: ClassVar[bool] = False  # the last layer selects too

    def knobs(self, step: StepGraph) -> None:
        """Choose where a step that attends exactly and selects by attention takes log-sum-exps from: a read of the keys of its own,
        beside the main stream, or the attention to the prefix, which is apart from that to the block then."""
        policy = step.phase.cache
        assert isinstance(policy, Selected)
        chosen = policy.attention
        exactly = policy.selects and chosen.selects == "first" and not chosen.carried and chosen.by == "mass"
        self._inside = exactly and step.g.choice("statistics", ("apart", "inside"), alike=False) == "inside"

    def begin(self, step: StepGraph) -> None:
        """Nothing is being selected yet."""
        policy = step.phase.cache
        assert isinstance(policy, Selected)
        self._selecting = False
        self._reusing: Reusing | None = None
        if policy.reuse is not None:
            self._reusing = Reusing(step, policy.reuse, policy.attention.exact_layers, refreshes=policy.refreshes)

    def project(self, step: StepGraph, layer: int, norm: Buffer, matrices: dict[str, Buffer], queries: Buffer) -> None:
        """As ever; what stores keys waits for the selection of the layer before, which reads others where these will lie."""
        if self._selecting:
            step.g.wait(SELECT, updates=step.kv)
            self._selecting = False
        super().project(step, layer, norm, matrices, queries)

    def attended(self, step: StepGraph, layer: int, q: Buffer) -> Buffer:
        """Register the attention of one layer over the queries' storage."""
        policy = step.phase.cache
        assert isinstance(policy, Selected)
        if layer not in policy.attention.sparse_layers(step.arch):
            reusing = self._reusing if layer < policy.attention.exact_layers else None
            return attend(step, layer, q) if reusing is None else reusing.attend(step, layer, q)
        if not policy.selects:
            return _attend_selected(step, policy, layer, q, "seen")
        if policy.attention.selects == "every":
            _select(step, policy, layer, q)
            return _attend_selected(step, policy, layer, q, "seen")
        queries = step.g.add_op("copy", q, name="queries")
        sums = None
        if self._inside:
            exact, sums = _attend_with_sums(step, layer, q)
        else:
            exact = attend(step, layer, q, "seen_exactly")
        y = _attend_selected(step, policy, layer, exact, "seen_sparsely")
        if layer + 1 == step.arch.layers:
            _select(step, policy, layer, queries, sums)  # nothing follows that it could run beside
            return y
        with step.g.stream(SELECT):  # beside the output projection and the feed-forward, as in the paper
            _select(step, policy, layer, queries, sums)
        self._selecting = True
        return y


def _attend_with_sums(step: StepGraph, layer: int, q: Buffer) -> tuple[Buffer, Buffer]:
    """Attention to all keys of the sequences that select, over the queries' storage, and the log-sum-exps over their prefixes."""
    g, arch, inputs, prefix = step.g, step.arch, step.inputs, step.inputs["candidates"]
    sizes = {"layer": layer, "kv_heads": arch.kv_heads, "head_size": arch.head_size, "scale": arch.head_size**-0.5}
    fresh, sums = g.add_op(
        "prefix_attention", q, step.kv, *extents_of(step), prefix, step.cu_seqlens, step.positions, name="prefix_attention",
        block=arch.block, span=step.span, keys=g.dim("keys"), parts=g.dim("parts"), **sizes,
    )  # fmt: skip
    y: Buffer = g.add_op(
        "joined_attention", q, step.kv, *extents_of(step), inputs["seen_exactly"], step.cu_seqlens, step.positions, prefix, None,
        None, None, fresh, sums, prefix, name="attention", slot=0, rows=arch.block, block=arch.block, **sizes,
    )  # fmt: skip
    g.add_alias(y, q)
    return y, sums


def _select(step: StepGraph, policy: Selected, layer: int, q: Buffer, sums: Buffer | None = None) -> None:
    """Rank the keys of each prefix that is selected from, and keep the best of every set; the rows' log-sum-exps may be known."""
    g, arch, inputs, chosen = step.g, step.arch, step.inputs, policy.attention
    if policy.bounded:
        _select_pages(step, policy, layer, q)
        return
    if sums is None:
        sums = g.add_op(
            "prefix_logsumexp", q, step.kv, *extents_of(step), inputs["candidates"], inputs["votes"], step.cu_seqlens,
            name="logsumexp", layer=layer, kv_heads=arch.kv_heads, head_size=arch.head_size, scale=arch.head_size**-0.5,
            span=step.span, keys=g.dim("keys"),
        )  # fmt: skip
    mass = g.add_op(
        "key_mass", q, step.kv, *extents_of(step), inputs["candidates"], inputs["cu_keys"], inputs["votes"], step.cu_seqlens,
        sums, step.positions if chosen.rows else None, name="mass", layer=layer, kv_heads=arch.kv_heads, head_size=arch.head_size,
        scale=arch.head_size**-0.5, sets=sets_of(chosen.per, arch), columns=g.dim("keys"), span=step.span,
        statistic=chosen.statistic, **_tiled(step, policy),
    )  # fmt: skip
    g.add_op(
        "top_keys", mass, inputs["candidates"], inputs["cu_keys"], inputs["owner"], g[index_sets(chosen).name],
        name="select", ratio=chosen.ratio, enough=chosen.mass, **_place(step, policy, layer),
    )  # fmt: skip


def _select_pages(step: StepGraph, policy: Selected, layer: int, q: Buffer) -> None:
    """Rank the whole pages of each prefix by what their keys can get at most, and keep the best of every set."""
    g, arch, inputs, chosen = step.g, step.arch, step.inputs, policy.attention
    place = _place(step, policy, layer)
    bound = g.add_op(
        "page_bounds", q, g[page_extrema(chosen).name], inputs["page_table"], inputs["cu_pages"], inputs["votes"],
        step.cu_seqlens, step.positions if chosen.rows else None, name="bounds", slot=place["slot"], kv_heads=arch.kv_heads,
        head_size=arch.head_size, sets=sets_of(chosen.per, arch), columns=g.dim("pages"), page_span=g.dim("page_span"),
        statistic=chosen.statistic, **_tiled(step, policy),
    )  # fmt: skip
    g.add_op(
        "top_keys", bound, inputs["candidates"], inputs["cu_pages"], inputs["owner"], g[index_sets(chosen).name],
        name="select", ratio=chosen.ratio, slot=place["slot"], sets=place["sets"], k=chosen.k // chosen.page, page=1,
    )  # fmt: skip


def _attend_selected(step: StepGraph, policy: Selected, layer: int, q: Buffer, seen: str) -> Buffer:
    """softmax(q k^T) v over selected keys and those behind the prefix, over the queries' storage."""
    g, arch, inputs = step.g, step.arch, step.inputs
    y: Buffer = g.add_op(
        "selected_attention", q, step.kv, *extents_of(step), g[index_sets(policy.attention).name], inputs["owner"],
        inputs["captured"], inputs[seen], step.cu_seqlens, step.positions, name="sparse_attention", layer=layer,
        kv_heads=arch.kv_heads, head_size=arch.head_size, scale=arch.head_size**-0.5, attended=g.dim("attended"),
        **_place(step, policy, layer) | _tiled(step, policy) | {"sets": sets_of(policy.attention.per, arch), "block": arch.block},
    )  # fmt: skip
    g.add_alias(y, q)
    return y


def _place(step: StepGraph, policy: Selected, layer: int) -> dict[str, Any]:
    """Where in a request's row a layer's sets lie, those of all tiles of rows."""
    chosen = policy.attention
    sets = sets_of(chosen.per, step.arch) * chosen.tiles(step.arch)
    return {"slot": layer - chosen.exact_layers, "sets": sets, "k": chosen.k, "page": chosen.page}


def _tiled(step: StepGraph, policy: Selected) -> dict[str, Any]:
    """The tiles of rows that have sets of their own."""
    chosen = policy.attention
    return {"block": step.arch.block, "rows": chosen.rows, "tiles": chosen.tiles(step.arch)} if chosen.rows else {}
