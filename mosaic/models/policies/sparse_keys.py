"""Sparse keys: bidirectional models compute a block over the keys that each head has kept (dLLM-Serve, section 4.5).

A Refresh computes the whole canvas. Layer by layer, while all keys of a layer exist, it scores them by the block's queries and
packs those with the highest scores into a state. Reuse steps compute the block alone, over the packed keys and its own. Both decide
tokens. A Refresh is for a span of blocks: the candidates are all positions outside the span. The span's own keys are packed behind
them, and the steps of its blocks renew theirs there.

`StepRequest.values` has "spans" in a Refresh (`select_keys` describes them), and "shift" in Reuse: the position whose key would lie
in the request's first row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias, get_args

import numpy as np

from mosaic.errors import UnknownName, UsageError
from mosaic.models.attention.heads import Heads
from mosaic.models.attention.kept import KeptIn, KeptTogether
from mosaic.models.attention.together import Together
from mosaic.models.inputs import Input
from mosaic.models.kept_keys import key_row
from mosaic.models.parts.cache import WHOLE, CachePolicy, Kept, KeysAndValues, Whole
from mosaic.models.policies.policy import BlockStep, Options, Policy, is_integer, is_number, with_parts
from mosaic.models.step import StepSize
from mosaic.registrar.operators.top_keys import fraction_of

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.attention import Way
    from mosaic.models.inputs import Window
    from mosaic.models.phase import Phase
    from mosaic.models.state import State
    from mosaic.models.step_graph import StepGraph
    from mosaic.registrar.graph import Buffer
    from mosaic.registrar.schemes.scheme import Bundle

__all__ = ["PACKED", "Keeping", "Packed", "Packing", "SparseKeys"]

Selection: TypeAlias = Literal["head-centric", "uniform", "uniform-published"]
Group: TypeAlias = Literal["max", "mean"]
PACKED: Final = KeysAndValues(name="packed", together=True)
"""A request's kept keys and values, laid out as one extent: row j is each head's own j-th key, and behind these its span's keys."""


# --- options ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseKeys(Options):
    """Which keys a Refresh keeps, and when there is one. The defaults are dLLM-Serve's, with a delay of 0.

    Parameters
    ----------
    retention
        The share of the positions outside the span whose keys each head keeps, in (0, 1], rounded down; one at least. Its
        decimal or fraction is taken as written.
    selection
        "head-centric": each key-value head keeps its own (equation 6). "uniform": all keep the same, by the sum over the query
        heads of their pooled scores (equation 5). "uniform-published": by the mean over the heads, which is then pooled, as the
        published codes of dLLM-Serve and Sparse-dLLM do.
    group
        With "head-centric", how the query heads that share a key-value head are combined before pooling: by the largest score or
        by their mean.
    pool
        Positions of the window whose largest score is that of its centre, an odd number.
    interval
        Blocks that share a Refresh.
    delay
        Full steps of a block before its Refresh: 0, or 1 as published.

    Raises
    ------
    UsageError
        If a value is invalid; the message is one line.

    Examples
    --------
    >>> str(SparseKeys()), str(SparseKeys(retention=0.1, interval=2))
    ('sparse', 'sparse(retention=0.1, interval=2)')
    """

    word: ClassVar[str] = "sparse"
    retention: float = 0.5
    selection: Selection = "head-centric"
    group: Group = "max"
    pool: int = 3
    interval: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        if not (is_number(self.retention) and 0 < self.retention <= 1):
            raise UsageError(f"cache: retention is {self.retention!r}; it must be a share of the keys, in (0, 1].")
        for name, options in (("selection", Selection), ("group", Group)):
            if getattr(self, name) not in get_args(options):
                raise UnknownName(f"cache's {name}", str(getattr(self, name)), get_args(options))
        if self.group != "max" and self.selection != "head-centric":
            raise UsageError(f"cache: group '{self.group}' is about selection 'head-centric'; leave it out.")
        if not (is_integer(self.pool, 1) and self.pool % 2):
            raise UsageError(f"cache: pool is {self.pool!r}; it must be an odd number of positions.")
        if not is_integer(self.interval, 1):
            raise UsageError(f"cache: interval is {self.interval!r}; it must be a number of blocks, at least 1.")
        if not (is_integer(self.delay, 0) and self.delay <= 1):
            raise UsageError(f"cache: delay is {self.delay!r}; it must be 0 or 1.")

    @classmethod
    def presets(cls) -> Mapping[str, SparseKeys]:
        """Return the one preset."""
        return {"sparse": cls()}

    def check(self, arch: Architecture, *, dual: bool = False) -> None:
        """Check that the model attends in both directions, without windows."""
        if arch.block or arch.windows:
            how = f"by blocks of {arch.block}" if arch.block else "within windows"
            raise UsageError(
                f"cache 'sparse': this model attends {how}; sparse keys are for models that attend in both directions to the "
                "whole canvas (LLaDA, Dream)."
            )

    def kept(self, candidates: int) -> int:
        """Return how many keys of so many candidates a head keeps.

        >>> [SparseKeys(retention=share).kept(100) for share in (1, 0.29, 1 / 3, 0.001)]
        [100, 29, 33, 1]
        """
        numerator, denominator = fraction_of(self.retention)
        return max(numerator * candidates // denominator, 1)

    def rows(self, length: int, span: int) -> int:
        """Return the rows of the state that a request takes, from the positions of its canvas and of its longest span."""
        return self.kept(length - span) + span

    def steps(
        self, phase: Phase, length: int, block: int, *, answer: int = 0, rows: int = 0, first: Phase | None = None
    ) -> dict[str, StepSize]:
        """Return the sizes of a request's steps by name: "full" with a delay, "refresh", "reuse", and on a shifted model
        "reuse_first", of a block without a Refresh.

        Parameters
        ----------
        phase
            Of its steps, but for the cache policy.
        length, block
            Positions of the canvas, and of a block.
        answer
            Tokens to generate; 0: at least an interval's.
        rows
            Rows that a step decides at most; 0: all of a block's.
        first
            On a shifted model, the same of a block's first step, which decides one row.

        Examples
        --------
        >>> from mosaic.models.phase import FULL_STEP
        >>> refresh, reuse = SparseKeys(retention=0.1).steps(FULL_STEP, 4096, 32).values()
        >>> refresh.windows, reuse.windows, reuse.keys
        ((4096,), (32,), (438,))
        """
        span = min(block * self.interval, answer or length - 1)
        packed, rows = self.rows(length, span), min(rows or block, block - (first is not None))
        begin = phase if first is None else first
        caches: dict[str, CachePolicy] = {"full": WHOLE, "refresh": self.packing}
        found = {}
        for number, name in enumerate([*caches][1 - self.delay :]):
            kind, decided = (begin, rows if first is None else 1) if number == 0 else (phase, rows)
            kind = with_parts(kind, cache=caches[name])
            found[name] = StepSize(phase=kind, windows=(length,), rows=max(decided, 1), states={PACKED: packed})
        if rows:
            found["reuse"] = StepSize(
                phase=with_parts(phase, cache=Packed()), windows=(block,), keys=(packed,), rows=rows
            )
        if first is not None and self.interval > 1:
            kind = with_parts(first, cache=Packed())
            found["reuse_first"] = StepSize(phase=kind, windows=(block + 1,), keys=(packed,), rows=1)
        return found

    def times(self, answer: int, block: int, *, shifted: bool = False) -> dict[str, int]:
        """Return how often a generation of `answer` tokens, one a step, takes each of `steps`, by name.

        >>> SparseKeys(interval=2, delay=1).times(256, 32)
        {'full': 4, 'refresh': 4, 'reuse': 248}
        """
        blocks = -(-answer // block)
        refreshes = -(-blocks // self.interval)
        found = {"full": self.delay * refreshes} if self.delay else {}
        found["refresh"] = refreshes
        first = {"reuse_first": blocks - refreshes} if shifted and self.interval > 1 else {}
        return found | {"reuse": max(answer - sum(found.values()) - sum(first.values()), 0)} | first

    @property
    def packing(self) -> Packing:
        """The cache policy of a Refresh."""
        return Packing(selection=self.selection, group=self.group, pool=self.pool)


# --- a Refresh --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing(Whole):
    """Whole sequences attend to themselves, and keep some keys and values of each layer; fields as in `SparseKeys`."""

    label: ClassVar[str] = "refresh"
    selection: Selection
    group: Group
    pool: int

    @property
    def states(self) -> Sequence[State]:
        """The packed keys."""
        return (PACKED,)

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return the inputs of whole sequences, what is scored and kept of each, and its one extent."""
        return (
            *CachePolicy.inputs(self, arch),
            Input(
                name="spans", dtype="int32", per="sequence", width=5,
                value=lambda window: np.array(window.request.values["spans"], dtype=np.int32),
            ),
            Input(
                name="packed_extents", dtype="int64", per="sequence", width=4,
                value=lambda window: window.request.states[PACKED].extents[0],
            ),
        )  # fmt: skip

    def check(self, request: Any, arch: Architecture) -> None:
        """Check that a request says what it keeps, and has rows for it."""
        spans, owned = request.values.get("spans"), request.states.get(PACKED)
        if spans is None or owned is None:
            raise UsageError("a Refresh needs 'spans' in the request's `values`, and its rows of the state 'packed'.")
        first, end, low, high, kept = spans
        length = request.token_ids.numel()
        if not (0 <= low <= first < end <= high <= length and 0 < kept <= length - (high - low)):
            raise UsageError(
                f"spans of a canvas of {length} positions: a block in its span and some keys kept, got {spans}."
            )
        if owned.length < kept + high - low:
            raise UsageError(
                f"{kept + high - low} packed keys of a request that has rows for {owned.length}: reserve more."
            )

    def declare(self, step: StepGraph) -> None:
        """Declare what is scored and kept."""
        for entry in self.inputs(step.arch):
            step.inputs[entry.name]

    def ways(self) -> Sequence[Way]:
        """Return all heads at once; and groups of them, if they choose for themselves."""
        whole: tuple[Way, ...] = (_PackingTogether(self),)
        return (*whole, _PackingHeads(self)) if self.selection == "head-centric" else whole

    def pack(
        self, step: StepGraph, layer: int, q: Buffer, k: Buffer, v: Buffer, chosen: Buffer | None = None,
        bounds: Buffer | None = None,
    ) -> None:  # fmt: skip
        """Score, select and pack the keys of all heads, or of those of a region, whose part of `chosen` is written; of all windows,
        or those within other `bounds`."""
        g, own, spans = step.g, step.arch.stack[layer].attention, step.inputs["spans"]
        alone, bounds = self.selection == "head-centric", bounds or step.cu_seqlens
        each, members = (1, 1) if alone else (own.heads // own.kv_heads, own.heads)
        scores = g.add_op(
            "score_keys", q, k, spans, bounds, name="scores", head_size=own.head_size, each=each, over=self.group,
        )  # fmt: skip
        chosen = g.add_op(
            "select_keys", scores, spans, bounds, out=chosen, name="select", members=members, pool=self.pool,
            pools="sum" if self.selection == "uniform-published" else "each",
        )  # fmt: skip
        g.add_op(
            "pack_keys", k, v, chosen, spans, bounds, step.inputs["packed_extents"], g[PACKED.name], name="pack",
            layer=key_row(step.arch).places[layer], kv_heads=own.kv_heads, head_size=own.head_size,
        )  # fmt: skip


class _PackingTogether(Together):
    """Keys are packed before attention overwrites the queries."""

    def __init__(self, policy: Packing) -> None:
        self._policy = policy

    def projected(self, step: StepGraph, layer: int, q: Buffer, k: Buffer, v: Buffer) -> None:
        """Keep some of a layer's keys and values."""
        self._policy.pack(step, layer, q, k, v)


class _PackingHeads(Heads):
    """The same of some heads at a time; queries and results are on the device, wherever hidden states are."""

    def __init__(self, policy: Packing) -> None:
        self._policy = policy

    def begin(self, step: StepGraph) -> None:
        """Have no results in host memory."""
        self._attended = None

    def register(self, step: StepGraph, layer: int, norm: Buffer, matrices: dict[str, Bundle]) -> None:
        """Declare what the heads choose, which says in a region where theirs lies."""
        self._chosen = step.g.buffer("chosen", (step.g.dim("kv_heads"), step.tokens), "int32")
        Heads.register(self, step, layer, norm, matrices)

    def projected(self, step: StepGraph, layer: int, q: Buffer, k: Buffer, v: Buffer) -> None:
        """Keep some of the heads' keys and values."""
        self._policy.pack(step, layer, q, k, v, self._chosen)


# --- Reuse ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Packed(Kept):
    """Windows write their keys and values behind the packed ones, and attend to all of them."""

    label: ClassVar[str] = "reuse"
    by_position: ClassVar[bool] = False

    @property
    def kept(self) -> State:
        """The packed keys."""
        return PACKED

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return the inputs of kept keys, and the extents by positions of the window."""
        own = Input(name="own_extents", dtype="int64", per="extent", width=4, value=_own_extents)
        return *Kept.inputs(self, arch), own

    def check(self, request: Any, arch: Architecture) -> None:
        """Check that a request says where its keys lie, and has rows for them."""
        shift, end = request.values.get("shift"), request.start + request.token_ids.numel()
        if shift is None or not hasattr(request.sequence, "extents"):
            raise UsageError("Reuse needs 'shift' in the request's `values`, and its rows of the state 'packed'.")
        if not (shift <= request.start and end - shift <= request.key_len <= request.sequence.length):
            raise UsageError(
                f"a window up to position {end} lies behind packed keys, shifted by {shift}, among {request.key_len} keys in "
                f"{request.sequence.length} rows."
            )
        arch.rotary.check_kept(max(end, request.final_length), request.final_length)

    def ways(self) -> Sequence[Way]:
        """Return the only option: windows are short."""
        return (_PackedTogether(),)


def _own_extents(window: Window) -> tuple[tuple[int, int, int, int], ...]:
    shift = window.request.values["shift"]
    return tuple((row, rows, first + shift, before) for row, rows, first, before in window.request.sequence.extents)


class _PackedTogether(KeptTogether):
    """Rows are found by position where keys are stored, and read in order."""

    def stored_in(self, step: StepGraph, layer: int) -> KeptIn:
        """Return the state with the extents by positions of the window, and the layer's place."""
        (kv, _, bounds), place = KeptTogether.stored_in(self, step, layer)
        return (kv, step.inputs["own_extents"], bounds), place


# --- hooks ------------------------------------------------------------------------------------------------------------


class Keeping(Policy):
    """Says of each step whether it refreshes or reuses, and what it computes."""

    def __init__(self, options: SparseKeys, config: Any, arch: Architecture, positions: int) -> None:
        self._options, self._shifted = options, arch.shifted
        self._span: tuple[int, int] | None = None

    def phase(self, phase: Phase, step: BlockStep) -> Phase:
        """Reuse what the last Refresh has kept for the block; if nothing, refresh after `delay` full steps of the block."""
        if step.number > self._options.delay or (self._span is not None and step.start < self._span[1]):
            return with_parts(phase, cache=Packed())
        return with_parts(phase, cache=WHOLE if step.number < self._options.delay else self._options.packing)

    def tell(self, step: BlockStep, request: Any) -> None:
        """Give the window, and what is kept; on a shifted model the row before the block too, while that predicts its first."""
        cache = step.phase.cache
        if not isinstance(cache, Packed):
            step.window = (0, request.length)
            if isinstance(cache, Packing):
                self._span = self._span_of(step, request.length)
                step.values["spans"] = step.start, step.end, *self._span, self._kept(request.length)
            return
        assert self._span is not None, "a Reuse step comes after a Refresh"
        (low, high), kept = self._span, self._kept(request.length)
        step.window = step.start - int(self._shifted and request.mask_array[step.start]), step.end
        step.key_len, step.values["shift"] = kept + high - low, low - kept

    def _kept(self, length: int) -> int:
        """The keys that a head keeps of those outside the span."""
        low, high = self._span or (0, 0)
        return self._options.kept(length - (high - low))

    def _span_of(self, step: BlockStep, length: int) -> tuple[int, int]:
        """The blocks that share the Refresh of a block, from the first one's start to the last one's end."""
        width = (step.end - step.start) * self._options.interval
        low = step.prompt_len + (step.start - step.prompt_len) // width * width
        return low, min(low + width, length)
