"""Kept keys of which a block attends to some: the policy of sparse attention. Legend: B sequences, T tokens.

A request says in `StepRequest.values` how many keys its prefix had when it selected ("captured"), of how many it selects in this
step ("candidates"; 0: it does not), whether it attends to all keys ("exactly"), and the position from which rows vote
("votes_from"). Requests that select, that attend to all keys, and that attend to what they have selected share a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mosaic.models.inputs import Input
from mosaic.models.parts.cache import KV, Kept
from mosaic.models.parts.part import ResultPer
from mosaic.models.parts.reused import CHANGE, check_reuse, reuse_inputs, reuse_states
from mosaic.models.reuse import PrefixReuse
from mosaic.models.sparse import Per, SparseAttention, sets_of
from mosaic.models.state import State
from mosaic.registrar.operators.top_keys import keys_of

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.attention import Way
    from mosaic.models.inputs import Window
    from mosaic.models.step import StepSize
    from mosaic.models.transformer import StepGraph

__all__ = ["IndexSets", "PageExtrema", "Selected", "Summarized", "index_sets", "page_extrema"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSets(State):
    """What requests have selected, a row each: of every sparse layer and set a count, then pages in ascending order."""

    least_rows: int = 1
    pages: int
    exact: int
    per: Per
    rows: int

    def columns(self, arch: Architecture) -> int:
        """Return the numbers of all sparse layers, tiles of rows and sets."""
        tiles = -(-arch.block // self.rows) if self.rows else 1
        return (arch.layers - self.exact) * sets_of(self.per, arch) * tiles * (1 + self.pages)


def index_sets(attention: SparseAttention) -> IndexSets:
    """Return the state that selections by these options are kept in: the same for options that lay it out alike."""
    pages, exact, per = attention.k // attention.page, attention.exact_layers + attention.exact_last, attention.per
    name = f"selected_{pages}_{exact}_{per}" + (f"_{attention.rows}_rows" if attention.rows else "")
    return IndexSets(name=name, dtype="int32", pages=pages, exact=exact, per=per, rows=attention.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageExtrema(State):
    """The least and the largest keys of whole pages, a row a page: of every sparse layer least, then largest of all heads."""

    exact: int

    def columns(self, arch: Architecture) -> int:
        """Return two keys of every sparse layer."""
        return (arch.layers - self.exact) * 2 * arch.kv_heads * arch.head_size


def page_extrema(attention: SparseAttention) -> PageExtrema:
    """Return the state that the bounds of pages are estimated from: the same for options that lay it out alike."""
    exact = attention.exact_layers + attention.exact_last
    return PageExtrema(name=f"pages_{attention.page}_{exact}", exact=exact)


def _pages_of(attention: SparseAttention, until: Callable[[Window], int]) -> tuple[Input, Input]:
    """The rows of the whole pages of each sequence's first `until` tokens, and where those of a sequence begin."""
    state, page = page_extrema(attention), attention.page
    return (
        Input(
            name="page_table", dtype="int64", per="page",
            value=lambda window: tuple(
                range(first, first + count)
                for first, count in window.request.states[state].runs(0, until(window) // page)
            ),
        ),
        Input(name="cu_pages", dtype="int32", per="bound", value=lambda window: until(window) // page),
    )  # fmt: skip


def _page_sizes(attention: SparseAttention, size: StepSize) -> dict[str, int]:
    """The pages of all sequences, and those that a sequence has: the mean, rounded up."""
    pages = max(sum(size.owned) // attention.page, 1)
    return {"pages": pages, "page_span": -(-pages // len(size.owned))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summarized(Kept):
    """Windows write keys and values that are final, and the extrema of the pages that are whole with them.

    Parameters
    ----------
    attention
        The options of those who read them, by the bounds of pages.
    """

    attention: SparseAttention

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return, beside those of kept keys, the pages that are whole, and which of them were before."""
        page = self.attention.page
        own = Input(name="first_page", dtype="int32", per="sequence", value=lambda window: window.start // page)
        return *Kept.inputs(self, arch), *_pages_of(self.attention, lambda window: window.end), own

    @property
    def states(self) -> Sequence[State]:
        """Keys and values, and the extrema of pages."""
        return KV, page_extrema(self.attention)

    def rows(self, owned: Sequence[int]) -> Mapping[State, int]:
        """Return a row of keys and values a token, and one of extrema for each whole page."""
        return _rows(self.attention, owned)

    def dims(self, step: StepGraph) -> None:
        """Declare, beside the dims of kept keys, the pages."""
        Kept.dims(self, step)
        step.g.dim("pages")

    def sizes(self, size: StepSize) -> Mapping[str, int]:
        """Return the pages of all tokens that are owned."""
        return {**Kept.sizes(self, size), "pages": _page_sizes(self.attention, size)["pages"]}

    def stored(self, step: StepGraph, layer: int) -> None:
        """Write the extrema of a sparse layer's pages."""
        g, arch, inputs, chosen = step.g, step.arch, step.inputs, self.attention
        if layer in chosen.sparse_layers(arch):
            g.add_op(
                "page_extrema", step.kv, inputs["extents"], inputs["cu_extents"], inputs["page_table"], inputs["cu_pages"],
                inputs["first_page"], g[page_extrema(chosen).name], name="extrema", layer=layer,
                slot=layer - chosen.exact_layers, page=chosen.page, kv_heads=arch.kv_heads, head_size=arch.head_size,
                tokens=step.tokens,
            )  # fmt: skip


def _rows(attention: SparseAttention, owned: Sequence[int]) -> Mapping[State, int]:
    """A request that has no whole page has a row all the same: one that takes part in a state has rows of it."""
    return {KV: sum(owned), page_extrema(attention): sum(max(tokens // attention.page, 1) for tokens in owned)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected(Kept):
    """Windows write their keys and values as ever, and attend in sparse layers to what was selected.

    Parameters
    ----------
    attention
        The options.
    selects
        Whether requests may select in the step.
    refreshes
        Whether exact layers may attend to the whole prefix in the step, where they reuse what they kept of it.
    """

    attention: SparseAttention
    selects: bool
    refreshes: bool = False

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return, beside those of kept keys, where selections lie and of how many keys; and who selects from what."""
        state = index_sets(self.attention)
        own = (
            Input(
                name="owner", dtype="int64", per="sequence",
                value=lambda window: window.request.states[state].runs(0, 1)[0][0],
            ),
            Input(name="captured", dtype="int32", per="sequence", value=lambda window: window.request.values["captured"]),
        )  # fmt: skip
        page = self.attention.page if self.bounded else 1
        ranked = (
            _pages_of(self.attention, lambda window: window.request.values["candidates"])
            if self.bounded
            else (Input(name="cu_keys", dtype="int32", per="bound", value=lambda window: window.request.key_len),)
        )
        selecting = (
            *ranked,
            Input(name="votes", dtype="uint8", per="token", value=_votes),
            Input(
                name="candidates",
                dtype="int32",
                per="sequence",
                value=lambda window: window.request.values["candidates"] // page,
            ),
        )
        mixed = (
            Input(name="seen_exactly", dtype="int32", per="sequence", value=_seen_exactly),
            Input(name="seen_sparsely", dtype="int32", per="sequence", value=_seen_sparsely),
        )
        first = self.attention.selects == "first"
        return (
            *Kept.inputs(self, arch),
            *own,
            *(selecting if self.selects else ()),
            *(mixed if self.selects and first else ()),
            *(reuse_inputs(self.reuse, self.attention.exact_layers, refreshes=self.refreshes) if self.reuse else ()),
        )

    @property
    def reuse(self) -> PrefixReuse | None:
        """When exact layers attend to the prefix, if not in every step."""
        return self.attention.reuse

    def check(self, request: Any, arch: Architecture) -> None:
        """Check, beside what kept keys need, that a request reuses only what has a place."""
        Kept.check(self, request, arch)
        if self.reuse is not None:
            check_reuse(request, refreshes=self.refreshes)

    @property
    def results(self) -> Mapping[str, ResultPer]:
        """By how much the queries of the last exact layer have changed, where that is measured."""
        return {} if self.reuse is None or self.reuse.change is None else {CHANGE: "sequence"}

    @property
    def bounded(self) -> bool:
        """Whether pages are ranked by what is kept of them, not by their keys."""
        return self.attention.by == "bounds"

    @property
    def covering(self) -> Selected:
        """The policy of steps in which requests may select, and refresh."""
        found = replace(self, selects=True, refreshes=self.reuse is not None)
        return self if found == self else found

    @property
    def states(self) -> Sequence[State]:
        """Keys and values, what was selected, what pages are ranked by, and what exact layers keep."""
        more = (page_extrema(self.attention),) if self.bounded else ()
        kept = () if self.reuse is None else reuse_states(self.reuse, self.attention.exact_layers)
        return KV, index_sets(self.attention), *more, *kept

    def rows(self, owned: Sequence[int]) -> Mapping[State, int]:
        """Return a row of keys and values a token, and one of extrema for each whole page where there are such."""
        return _rows(self.attention, owned) if self.bounded else Kept.rows(self, owned)

    def ways(self) -> Sequence[Way]:
        """Return the one way: windows are short."""
        from mosaic.models.attention import selected

        return (selected.SelectedTogether(),)

    def dims(self, step: StepGraph) -> None:
        """Declare, beside the dims of kept keys, the keys that a query of a sparse layer attends to."""
        Kept.dims(self, step)
        step.g.dim("attended", at_most="keys")
        if self.bounded:
            step.g.dim("pages")
            step.g.dim("page_span", at_most="pages")

    def sizes(self, size: StepSize) -> Mapping[str, int]:
        """Return the keys that a query attends to, those selected and its window's own: the mean over sequences, rounded up.

        As for `span`, windows lie at the end of what is owned, so that the plan serves while they move on.
        """
        chosen = self.attention
        counts = [
            min(keys, min(chosen.k, keys_of(chosen.ratio, keys) if chosen.ratio else chosen.k) + window)
            for window, keys in zip(size.windows, size.owned, strict=True)
        ]
        pages = _page_sizes(chosen, size) if self.bounded else {}
        return {**Kept.sizes(self, size), "attended": -(-sum(counts) // len(counts)), **pages}


def _votes(window: Window) -> Any:
    votes, first = window.token_ids.new_zeros(window.length), window.request.values["votes_from"]
    places = window.request.values.get("positions")  # of tokens that stand apart
    votes[max(first - window.start, 0) if places is None else int((places < first).sum()) :] = 1
    return votes.byte()


def _seen_exactly(window: Window) -> int:
    return int(window.request.key_len) if window.request.values["exactly"] else 0


def _seen_sparsely(window: Window) -> int:
    return 0 if window.request.values["exactly"] else int(window.request.key_len)
