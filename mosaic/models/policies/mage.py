"""MAGE: sparse attention of a block to selected kept keys. Legend: B sequences, T tokens.

`StepRequest.values` has the length of a request's prefix when it selected ("captured"), the number of keys that it
selects from in this step ("candidates"; 0: it does not select), whether it attends to all keys ("exactly"), and the
position from which rows vote ("votes_from"). Requests that select, that attend to all keys, and that attend to selected
keys may share a step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final

from mosaic.errors import UsageError
from mosaic.models.attention.kept import KeptQueries, KeptTogether, attend, extents_of
from mosaic.models.inputs import Input, together
from mosaic.models.kept_keys import attending
from mosaic.models.parts.cache import KV, Kept
from mosaic.models.policies.flashblock import (
    CHANGE,
    JoinedLayers,
    Reusing,
    check_reuse,
    reuse_inputs,
    reuse_of_table,
    reuse_states,
)
from mosaic.models.policies.mage_options import SparseAttention, index_sets, page_extrema, sets_of
from mosaic.models.policies.policy import BlockStep, Policy, marks_of, with_parts
from mosaic.models.state import State
from mosaic.registrar.operators.top_keys import keys_of

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.attention import Way
    from mosaic.models.inputs import Supply, Window
    from mosaic.models.parts.part import ResultPer
    from mosaic.models.phase import Phase
    from mosaic.models.policies.flashblock import PrefixReuse
    from mosaic.models.step_graph import StepGraph
    from mosaic.registrar.graph import Buffer
    from mosaic.registrar.schemes.scheme import Bundle

SELECT: Final = "select"
"""The stream on which keys are ranked, beside the rest of a layer."""
_OF_TABLE: Final = ("owner", "captured", "candidates", "seen_exactly", "seen_sparsely", "cu_keys", "votes")
"""What `select_requests` finds."""


def _pages_of(attention: SparseAttention, until: Callable[[Window], int]) -> tuple[Input, Input]:
    """The extrema rows of the whole pages in each sequence's first `until` tokens, and their bounds by sequence."""
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


def _page_sizes(attention: SparseAttention, owned: Sequence[int]) -> dict[str, int]:
    """The number of pages of all sequences, and the mean per sequence, rounded up."""
    pages = max(sum(owned) // attention.page, 1)
    return {"pages": pages, "page_span": -(-pages // len(owned))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summarized(Kept):
    """Windows write final keys and values, and the extrema of the pages that they complete.

    Parameters
    ----------
    attention
        The options of later sparse steps, which rank pages by bounds.
    """

    attention: SparseAttention

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return the inputs of kept keys, the whole pages, and which of them were whole before."""
        page = self.attention.page
        own = Input(name="first_page", dtype="int32", per="sequence", value=lambda window: window.start // page)
        return *Kept.inputs(self, arch), *_pages_of(self.attention, lambda window: window.end), own

    @property
    def states(self) -> Sequence[State]:
        """Keys and values, and the extrema of pages."""
        return KV, page_extrema(self.attention)

    def rows(self, owned: Sequence[int]) -> Mapping[State, int]:
        """Return one row of keys and values per token, and one of extrema per whole page."""
        return _rows(self.attention, owned)

    def dims(self, step: StepGraph) -> None:
        """Declare the dims of kept keys, and the pages."""
        Kept.dims(self, step)
        step.g.dim("pages")

    def sizes(self, windows: Sequence[int], owned: Sequence[int]) -> Mapping[str, int]:
        """Return the pages of all tokens that are owned."""
        return {**Kept.sizes(self, windows, owned), "pages": _page_sizes(self.attention, owned)["pages"]}

    def ways(self) -> Sequence[Way]:
        """Return the options for kept keys; they write the extrema of pages where keys are stored."""
        return KeptTogether(self._stored), KeptQueries(self._stored)

    def _stored(self, step: StepGraph, layer: int) -> None:
        g, arch, inputs, chosen = step.g, step.arch, step.inputs, self.attention
        if layer in chosen.sparse_layers(arch):
            heads = arch.attention
            g.add_op(
                "page_extrema", step.kv, inputs["extents"], inputs["cu_extents"], inputs["page_table"], inputs["cu_pages"],
                inputs["first_page"], g[page_extrema(chosen).name], name="extrema", layer=layer,
                slot=layer - chosen.exact_layers, page=chosen.page, kv_heads=heads.kv_heads, head_size=heads.head_size,
                tokens=step.tokens,
            )  # fmt: skip


def _rows(attention: SparseAttention, owned: Sequence[int]) -> Mapping[State, int]:
    """Reserve at least one row: a request without a whole page needs a row, because it takes part in the state."""
    return {KV: sum(owned), page_extrema(attention): sum(max(tokens // attention.page, 1) for tokens in owned)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected(Kept):
    """Windows write their keys and values, and attend to selected keys in sparse layers.

    Parameters
    ----------
    attention
        The options.
    selects
        Whether requests may select in the step.
    refreshes
        Whether exact layers may attend to the whole prefix in the step, if they otherwise reuse their output over it.
    """

    attention: SparseAttention
    selects: bool
    refreshes: bool = False

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return the inputs of kept keys, the places and sizes of selections, and who selects from how many keys."""
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

    def of_table(self, step: StepGraph, served: Mapping[str, Buffer]) -> Mapping[str, Supply]:
        """Return the same inputs, where pages are ranked by their keys."""
        chosen, given = (
            self.attention,
            [served[name] for name in ("requests", "served", "seen", "cu_seqlens", "positions")],
        )
        found = together(
            _OF_TABLE,
            lambda: step.g.add_op(
                "select_requests", *given, name="selecting", own=index_sets(chosen).own_column,
                carried=chosen.carried, answer=chosen.voters == "answer",
            ),
        )  # fmt: skip
        return (
            found if self.reuse is None else {**found, **reuse_of_table(self.reuse, chosen.exact_layers, step, served)}
        )

    @property
    def reuse(self) -> PrefixReuse | None:
        """When exact layers attend to the prefix, if not in every step."""
        return self.attention.reuse

    def check(self, request: Any, arch: Architecture) -> None:
        """Check the needs of kept keys, and that a request reuses only rows that have places."""
        Kept.check(self, request, arch)
        if self.reuse is not None:
            check_reuse(request, refreshes=self.refreshes)

    @property
    def results(self) -> Mapping[str, ResultPer]:
        """The relative change of the queries of the last exact layer, if it is measured."""
        return {} if self.reuse is None or self.reuse.change is None else {CHANGE: "sequence"}

    @property
    def bounded(self) -> bool:
        """Whether pages are ranked by their extrema instead of their keys."""
        return self.attention.by == "bounds"

    @property
    def covering(self) -> Selected:
        """The policy of steps in which requests may select, and refresh."""
        found = replace(self, selects=True, refreshes=self.reuse is not None)
        return self if found == self else found

    @property
    def serves_exact(self) -> bool:
        """Return whether no layer reuses outputs."""
        return self.reuse is None

    @property
    def states(self) -> Sequence[State]:
        """Keys and values, selections, the extrema that rank pages, and the outputs that exact layers reuse."""
        more = (page_extrema(self.attention),) if self.bounded else ()
        kept = () if self.reuse is None else reuse_states(self.reuse, self.attention.exact_layers)
        return KV, index_sets(self.attention), *more, *kept

    def rows(self, owned: Sequence[int]) -> Mapping[State, int]:
        """Return one row of keys and values per token, and, for ranking by bounds, one of extrema per whole page."""
        return _rows(self.attention, owned) if self.bounded else Kept.rows(self, owned)

    def ways(self) -> Sequence[Way]:
        """Return the only option: windows are short."""
        return (SelectedTogether(self),)

    def dims(self, step: StepGraph) -> None:
        """Declare the dims of kept keys, and the keys that a query of a sparse layer attends to."""
        Kept.dims(self, step)
        step.g.dim("attended", at_most="keys")
        if self.bounded:
            step.g.dim("pages")
            step.g.dim("page_span", at_most="pages")

    def sizes(self, windows: Sequence[int], owned: Sequence[int]) -> Mapping[str, int]:
        """Return the keys that a query attends to, selected and in its window: the mean over sequences, rounded up.

        As for `span`, windows are taken to lie at the end of the owned rows, so one plan serves while they move on.
        """
        chosen = self.attention
        counts = [
            min(keys, min(chosen.k, keys_of(chosen.ratio, keys) if chosen.ratio else chosen.k) + window)
            for window, keys in zip(windows, owned, strict=True)
        ]
        pages = _page_sizes(chosen, owned) if self.bounded else {}
        return {**Kept.sizes(self, windows, owned), "attended": -(-sum(counts) // len(counts)), **pages}


def _votes(window: Window) -> Any:
    votes, first = window.token_ids.new_zeros(window.length), window.request.values["votes_from"]
    places = window.request.values.get("positions")  # if the tokens stand apart
    votes[max(first - window.start, 0) if places is None else int((places < first).sum()) :] = 1
    return votes.byte()


def _seen_exactly(window: Window) -> int:
    return int(window.request.key_len) if window.request.values["exactly"] else 0


def _seen_sparsely(window: Window) -> int:
    return 0 if window.request.values["exactly"] else int(window.request.key_len)


# --- attention --------------------------------------------------------------------------------------------------------


class SelectedTogether(KeptTogether):
    """All queries at once. In a step that selects, each sequence attends as its request says."""

    name: ClassVar[str] = "together"
    by_rows: ClassVar[bool] = False  # all rows of the last layer vote

    def __init__(self, policy: Selected) -> None:
        KeptTogether.__init__(self)
        self._policy = policy
        self.cuts = policy.reuse is None

    def knobs(self, step: StepGraph) -> None:
        """Declare the choice of where an exact step that selects by attention gets log-sum-exps: a separate read of the
        keys, beside the main stream, or attention to the prefix, which is then apart from attention to the block."""
        policy, chosen = self._policy, self._policy.attention
        exactly = policy.selects and chosen.selects == "first" and not chosen.carried and chosen.by == "mass"
        self._inside = exactly and step.g.choice("statistics", ("apart", "inside"), alike=False) == "inside"

    def begin(self, step: StepGraph) -> None:
        """Begin with no pending selection."""
        policy = self._policy
        self._selecting = False
        self._joined: JoinedLayers | None = None
        if policy.reuse is not None:
            self._joined = JoinedLayers(step, policy.reuse, policy.attention.exact_layers, refreshes=policy.refreshes)

    def kind(self, step: StepGraph, layer: int) -> Hashable:
        """Return whether the layer is sparse; of exact first layers, whether it is the last one."""
        chosen = self._policy.attention
        return layer in chosen.sparse_layers(step.arch), layer < chosen.exact_layers, layer + 1 == chosen.exact_layers

    def project(self, step: StepGraph, layer: int, norm: Buffer, matrices: dict[str, Bundle], queries: Buffer) -> None:
        """Wait for the previous layer's selection, which reads keys that this layer's may overwrite."""
        if self._selecting:
            step.g.wait(SELECT, updates=step.kv)
            self._selecting = False
        super().project(step, layer, norm, matrices, queries)

    def attended(self, step: StepGraph, layer: int, q: Buffer) -> Buffer:
        """Register the attention of one layer; results replace queries."""
        policy = self._policy
        if layer not in policy.attention.sparse_layers(step.arch):
            joined = self._joined if layer < policy.attention.exact_layers else None
            return attend(step, layer, q) if joined is None else joined.attend(step, layer, q)
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
            _select(step, policy, layer, queries, sums)  # the last layer: no later op could run beside it
            return y
        with step.g.stream(SELECT):  # beside the output projection and the feed-forward, as in the paper
            _select(step, policy, layer, queries, sums)
        self._selecting = True
        return y


def _attend_with_sums(step: StepGraph, layer: int, q: Buffer) -> tuple[Buffer, Buffer]:
    """Attention to all keys of the sequences that select, in place of the queries; log-sum-exps over their prefixes."""
    g, arch, inputs, prefix = step.g, step.arch, step.inputs, step.inputs["candidates"]
    sizes = attending(arch, layer)
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
    """Rank the keys of each prefix to select from, and keep the best of every set; log-sum-exps may be given."""
    g, arch, inputs, chosen = step.g, step.arch, step.inputs, policy.attention
    if policy.bounded:
        _select_pages(step, policy, layer, q)
        return
    if sums is None:
        sums = g.add_op(
            "prefix_logsumexp", q, step.kv, *extents_of(step), inputs["candidates"], inputs["votes"], step.cu_seqlens,
            name="logsumexp", span=step.span, keys=g.dim("keys"), **attending(arch, layer),
        )  # fmt: skip
    mass = g.add_op(
        "key_mass", q, step.kv, *extents_of(step), inputs["candidates"], inputs["cu_keys"], inputs["votes"], step.cu_seqlens,
        sums, step.positions if chosen.rows else None, name="mass", sets=sets_of(chosen.per, arch), columns=g.dim("keys"),
        span=step.span, statistic=chosen.statistic, **_tiled(step, policy), **attending(arch, layer),
    )  # fmt: skip
    g.add_op(
        "top_keys", mass, inputs["candidates"], inputs["cu_keys"], inputs["owner"], g[index_sets(chosen).name],
        name="select", ratio=chosen.ratio, enough=chosen.mass, **_place(step, policy, layer),
    )  # fmt: skip


def _select_pages(step: StepGraph, policy: Selected, layer: int, q: Buffer) -> None:
    """Rank the whole pages of each prefix by upper bounds of their keys' scores, and keep the best of every set."""
    g, arch, inputs, chosen = step.g, step.arch, step.inputs, policy.attention
    place = _place(step, policy, layer)
    bound = g.add_op(
        "page_bounds", q, g[page_extrema(chosen).name], inputs["page_table"], inputs["cu_pages"], inputs["votes"],
        step.cu_seqlens, step.positions if chosen.rows else None, name="bounds", slot=place["slot"],
        kv_heads=arch.attention.kv_heads, head_size=arch.attention.head_size, sets=sets_of(chosen.per, arch),
        columns=g.dim("pages"), page_span=g.dim("page_span"), statistic=chosen.statistic, **_tiled(step, policy),
    )  # fmt: skip
    g.add_op(
        "top_keys", bound, inputs["candidates"], inputs["cu_pages"], inputs["owner"], g[index_sets(chosen).name],
        name="select", ratio=chosen.ratio, slot=place["slot"], sets=place["sets"], k=chosen.k // chosen.page, page=1,
    )  # fmt: skip


def _attend_selected(step: StepGraph, policy: Selected, layer: int, q: Buffer, seen: str) -> Buffer:
    """softmax(q k^T) v over selected keys and keys after the prefix; results replace queries."""
    g, arch, inputs = step.g, step.arch, step.inputs
    y: Buffer = g.add_op(
        "selected_attention", q, step.kv, *extents_of(step), g[index_sets(policy.attention).name], inputs["owner"],
        inputs["captured"], inputs[seen], step.cu_seqlens, step.positions, name="sparse_attention",
        attended=g.dim("attended"), **attending(arch, layer),
        **_place(step, policy, layer) | _tiled(step, policy) | {"sets": sets_of(policy.attention.per, arch), "block": arch.block},
    )  # fmt: skip
    g.add_alias(y, q)
    return y


def _place(step: StepGraph, policy: Selected, layer: int) -> dict[str, Any]:
    """The columns of a layer's sets, over all tiles of rows, in a request's row."""
    chosen = policy.attention
    sets = sets_of(chosen.per, step.arch) * chosen.tiles(step.arch)
    return {"slot": layer - chosen.exact_layers, "sets": sets, "k": chosen.k, "page": chosen.page}


def _tiled(step: StepGraph, policy: Selected) -> dict[str, Any]:
    """The tiles of rows that have sets of their own."""
    chosen = policy.attention
    return {"block": step.arch.block, "rows": chosen.rows, "tiles": chosen.tiles(step.arch)} if chosen.rows else {}


# --- hooks ------------------------------------------------------------------------------------------------------------


class Selecting(Policy):
    """Selects keys in the steps that the options name, and attends to them in the others."""

    def __init__(self, options: SparseAttention, config: Any, arch: Architecture, positions: int) -> None:
        self._attention = options.within(positions) if positions else options
        self._reusing = None if options.reuse is None else Reusing(options.reuse, config, arch, positions)
        self.tabled = options.selects == "first" and (self._reusing is None or self._reusing.tabled)
        self._selects_all = bool(positions) and options.selects_all(positions)
        if options.selects == "every":
            self.within = False
            if config.block_commit == "cached":
                raise UsageError(
                    "block_commit 'cached': attention that selects in every step commits a block in a step of its own, whole; "
                    "leave it out."
                )

    def phase(self, phase: Phase, step: BlockStep) -> Phase:
        """Attend to selected keys; steps that write final keys write page extrema, if pages are ranked by them."""
        chosen = self._attention
        if step.writes:
            return with_parts(phase, cache=Summarized(attention=chosen)) if chosen.by == "bounds" else phase
        refreshes = self._reusing is not None and self._reusing.refreshes(step)
        selects = chosen.selects_in(step.number, step.steps)
        return with_parts(phase, cache=Selected(attention=chosen, selects=selects, refreshes=refreshes))

    def of_table(self, phase: Phase, step: BlockStep) -> tuple[Phase, int] | None:
        """Mark the steps that select, or none if sets hold all keys that there will be; the others refresh if one of them does."""
        if self.tabled and self._selects_all:
            return phase, 0
        found = _of_table(self._attention, step.end - step.start, step.steps) if self.tabled else None
        return None if found is None else (with_parts(phase, cache=found[0]), found[1])

    def tell(self, step: BlockStep, request: Any) -> None:
        """State the length of the prefix, how it is attended to, and who votes."""
        if step.writes:
            return
        if self._reusing is not None:
            self._reusing.tell(step, request)
        chosen, before = self._attention, 2 * step.start - step.end
        ranked = step.start // chosen.page * chosen.page if chosen.by == "bounds" else step.start
        carries = chosen.carried and step.number == 0 and before >= step.prefix
        selects = chosen.selects_in(step.number, step.steps)
        step.values |= {
            "captured": before if carries else ranked,
            "candidates": ranked if selects else 0,
            "exactly": selects and not carries and chosen.selects == "first",
            "votes_from": step.start if chosen.voters == "block" else max(step.start, step.prompt_len),
        }

    def take(self, step: BlockStep, request: Any, result: Any) -> None:
        """Record the refreshed rows, if exact layers reuse."""
        if self._reusing is not None:
            self._reusing.take(step, request, result)


@lru_cache(maxsize=1024)
def _of_table(chosen: SparseAttention, block: int, steps: int) -> tuple[Selected, int] | None:
    """The cache policy of a block's steps that do not select, and the bits of those that do."""
    selects = [chosen.selects_in(step, steps) for step in range(block)]
    marks, reuse = marks_of(selects.__getitem__, block), chosen.reuse
    refreshes = reuse is not None and any(reuse.refreshes_in(step) and not selects[step] for step in range(block))
    return None if marks is None else (Selected(attention=chosen, selects=False, refreshes=refreshes), marks)
