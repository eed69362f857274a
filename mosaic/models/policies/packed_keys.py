"""The steps of sparse keys: a Refresh packs the keys that each head keeps, Reuse attends to them, a windowed Refresh renews some.

A Refresh computes the whole canvas, and packs the kept keys of each layer while all of them exist. The positions of a span are not
chosen among: all of their keys are packed, behind the others. Reuse steps compute a window of the span, and renew its keys there.

A windowed Refresh computes the span, and one of the equal parts that the positions before it are cut into. Its rows attend to
their own keys, and to the packed ones of all other positions. Each head then keeps as many keys of the part as before, the best of
the new ones. Packed keys of other parts stay. `bound_parts` says where each part's keys lie.

`StepRequest.values` has "spans" in a Refresh (`select_keys` describes them; in a windowed one they count its rows). If later ones
are windowed, the first has "parts", their number, and each later one "part", its own. Reuse has "shift": the position whose key
would lie in the request's first row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias

import numpy as np

from mosaic.errors import UsageError
from mosaic.models.attention.heads import Heads
from mosaic.models.attention.kept import KeptIn, KeptTogether
from mosaic.models.attention.projections import project_out, project_rows
from mosaic.models.attention.together import Together
from mosaic.models.inputs import Input
from mosaic.models.kept_keys import attending, head_row, key_row
from mosaic.models.parts.cache import CachePolicy, Kept, KeysAndValues, Whole
from mosaic.models.parts.windows import Apart
from mosaic.models.state import State

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.attention import Way
    from mosaic.models.inputs import Window
    from mosaic.models.parts.part import ResultPer
    from mosaic.models.step_graph import StepGraph
    from mosaic.registrar.graph import Buffer
    from mosaic.registrar.schemes.scheme import Bundle

__all__ = ["FEW", "KEY_CHANGE", "PACKED", "PARTS", "Group", "Packed", "Packing", "Selection", "SpanPacked", "Windowed"]

Selection: TypeAlias = Literal["head-centric", "uniform", "uniform-published"]
Group: TypeAlias = Literal["max", "mean"]
PACKED: Final = KeysAndValues(name="packed", together=True)
"""A request's kept keys and values, laid out as one extent: row j is each head's own j-th key, and behind these its span's keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedParts(State):
    """Which packed rows have keys of a part, [begin, end) for every layer and key-value head: one row for each part."""

    def columns(self, arch: Architecture) -> int:
        """Return two numbers for each head of all layers."""
        return head_row(arch).columns


PARTS: Final = PackedParts(name="packed_parts", dtype="int32", together=True, least_rows=1)


@dataclass(frozen=True, slots=True)
class _Few(Apart):
    """Windows of positions that lie apart; their number is that of the request's other such steps."""

    padded: ClassVar[bool] = False


KEY_CHANGE: Final = "key_change"
"""The output with the relative change of a request's keys."""
FEW: Final = _Few()
"""The tokens of a windowed Refresh."""


# --- a Refresh --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing(Whole):
    """Whole sequences attend to themselves, and keep some keys and values of each layer.

    Parameters
    ----------
    selection, group, pool
        As in `SparseKeys`.
    parts
        Whether to note which keys belong to which part, as a windowed Refresh needs.
    """

    label: ClassVar[str] = "refresh"
    selection: Selection
    group: Group
    pool: int
    parts: bool = False

    @property
    def states(self) -> Sequence[State]:
        """The packed keys, and where those of each part are."""
        return (PACKED, PARTS) if self.parts else (PACKED,)

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return the inputs of whole sequences, what is scored and kept of each, its one extent, and the rows of its parts."""
        parts = Input(name="held_rows", dtype="int64", per="sequence", width=2, value=_held_rows)
        return *self._inputs(arch), *((parts,) if self.parts else ())

    def _inputs(self, arch: Architecture) -> Sequence[Input]:
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
        parts = request.values.get("parts", 0)
        if self.parts and not (0 < parts <= low and low % parts == 0 and high == length):
            raise UsageError(
                f"{parts} parts of the {low} positions before a span: as long as each other, and the span last."
            )

    def declare(self, step: StepGraph) -> None:
        """Declare what is scored and kept."""
        for entry in self.inputs(step.arch):
            step.inputs[entry.name]

    def ways(self) -> Sequence[Way]:
        """Return all heads at once; and groups of them, if they choose for themselves."""
        whole: tuple[Way, ...] = (_PackingTogether(self),)
        return (*whole, _PackingHeads(self)) if self.selection == "head-centric" else whole

    def held(self, step: StepGraph, layer: int) -> tuple[tuple[Buffer, ...], dict[str, Any]]:
        """Return the operands that say how many keys of a part each head keeps, and the layer's slot; none of a whole Refresh."""
        return (), {}

    def choose(
        self, step: StepGraph, layer: int, q: Buffer, k: Buffer, chosen: Buffer | None = None, bounds: Buffer | None = None
    ) -> Buffer:  # fmt: skip
        """Score and select the keys of all heads, or of those of a region, whose part of `chosen` is written; of all windows, or
        those within other `bounds`."""
        g, own, spans = step.g, step.arch.stack[layer].attention, step.inputs["spans"]
        bounds = bounds or step.cu_seqlens
        alone, (held, slot) = self.selection == "head-centric", self.held(step, layer)
        each, members = (1, 1) if alone else (own.heads // own.kv_heads, own.heads)
        scores = g.add_op(
            "score_keys", q, k, spans, bounds, name="scores", head_size=own.head_size, each=each, over=self.group,
        )  # fmt: skip
        found: Buffer = g.add_op(
            "select_keys", scores, spans, bounds, *held, out=chosen, name="select", members=members, pool=self.pool,
            pools="sum" if self.selection == "uniform-published" else "each", **slot,
            **({"kv_heads": own.kv_heads} if held else {}),
        )  # fmt: skip
        return found

    def pack(
        self, step: StepGraph, layer: int, k: Buffer, v: Buffer, chosen: Buffer, bounds: Buffer | None = None
    ) -> None:
        """Pack what was chosen."""
        g, own, (held, slot) = step.g, step.arch.stack[layer].attention, self.held(step, layer)
        g.add_op(
            "pack_keys", k, v, chosen, step.inputs["spans"], bounds or step.cu_seqlens, step.inputs["packed_extents"],
            g[PACKED.name], *held, name="pack", layer=key_row(step.arch).places[layer], kv_heads=own.kv_heads,
            head_size=own.head_size, **slot,
        )  # fmt: skip

    def keep(self, step: StepGraph, layer: int, q: Buffer, k: Buffer, v: Buffer, chosen: Buffer | None = None) -> None:
        """Choose and pack, and note where the keys of each part are."""
        chosen, kv_heads = self.choose(step, layer, q, k, chosen), step.arch.stack[layer].attention.kv_heads
        if self.parts:
            step.g.add_op(
                "bound_parts", chosen, step.inputs["spans"], step.cu_seqlens, step.inputs["held_rows"], step.g[PARTS.name],
                name="parts", slot=head_row(step.arch).places[layer], kv_heads=kv_heads,
                heads=1 if self.selection == "head-centric" else kv_heads,
            )  # fmt: skip
        self.pack(step, layer, k, v, chosen)


def _held_rows(window: Window) -> tuple[int, int]:
    """The first row of a request's parts, and how many there are."""
    parts = window.request.values["parts"]
    return window.request.states[PARTS].runs(0, parts)[0][0], parts


class _PackingTogether(Together):
    """Keys are packed before attention overwrites the queries."""

    def __init__(self, policy: Packing) -> None:
        self._policy = policy

    def projected(self, step: StepGraph, layer: int, q: Buffer, k: Buffer, v: Buffer) -> None:
        """Keep some of a layer's keys and values."""
        self._policy.keep(step, layer, q, k, v)


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
        self._policy.keep(step, layer, q, k, v, self._chosen)


# --- a windowed Refresh -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Windowed(Packing):
    """A part of the positions before the span, and the span, attend to themselves and to the packed keys of other parts."""

    label: ClassVar[str] = "windowed"
    parts: bool = True

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return the inputs of a Refresh, with the row of the part."""
        part = Input(
            name="held_row", dtype="int64", per="sequence",
            value=lambda window: window.request.states[PARTS].runs(0)[0][0] + window.request.values["part"],
        )  # fmt: skip
        return *self._inputs(arch), part

    def length(self, window: Window) -> int:
        """Return the length of the canvas, as of whole sequences."""
        return int(window.request.final_length)

    def check(self, request: Any, arch: Architecture) -> None:
        """Check that a request says what it renews, and has rows for it."""
        spans, owned, parts = request.values.get("spans"), request.states.get(PACKED), request.states.get(PARTS)
        part = request.values.get("part")
        if spans is None or part is None or owned is None or parts is None:
            raise UsageError(
                "a windowed Refresh needs 'spans' and 'part', and rows of the states 'packed' and 'packed_parts'."
            )
        (first, end, low, high, kept), length = spans, request.token_ids.numel()
        if not (
            0 < low <= first < end <= high == length
            and 0 < kept == owned.length - (high - low)
            and 0 <= part < parts.length
        ):
            raise UsageError(
                f"a windowed Refresh of {length} rows: a part of {parts.length}, then a span with the block; and of "
                f"{owned.length} packed rows, those before the span's; got part {part} and spans {spans}."
            )

    def ways(self) -> Sequence[Way]:
        """Return the only option: windows are short."""
        return (_Renewing(self),)

    def held(self, step: StepGraph, layer: int) -> tuple[tuple[Buffer, ...], dict[str, Any]]:
        """Return the state of parts, the rows of this step's, and the layer's slot."""
        return (step.g[PARTS.name], step.inputs["held_row"]), {"slot": head_row(step.arch).places[layer]}

    def attend(self, step: StepGraph, layer: int, q: Buffer, k: Buffer, v: Buffer) -> Buffer:
        """Register the attention of one layer; results replace queries."""
        g, (held, slot) = step.g, self.held(step, layer)
        y: Buffer = g.add_op(
            "packed_attention", q, k, v, g[PACKED.name], step.inputs["packed_extents"], *held, step.inputs["spans"],
            step.cu_seqlens, name="attention", span=step.span, keys=g.dim(PACKED.rows_dim), **slot,
            **attending(step.arch, layer),
        )  # fmt: skip
        g.add_alias(y, q)
        return y


class _Renewing(Together):
    """Rows attend before the kept keys of their part are written over."""

    def __init__(self, policy: Windowed) -> None:
        self._policy = policy

    def register(self, step: StepGraph, layer: int, norm: Buffer, matrices: dict[str, Bundle]) -> None:
        """Project, choose, attend, pack, add to the residual."""
        q, k, v = self.whole(step, layer, norm, matrices)
        chosen = self._policy.choose(step, layer, q, k)
        y = self._policy.attend(step, layer, q, k, v)
        self._policy.pack(step, layer, k, v, chosen)
        project_out(step, y, matrices["o_proj"])


# --- Reuse ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Packed(Kept):
    """Windows write their keys and values behind the packed ones, and attend to all of them.

    Parameters
    ----------
    changes
        Whether steps tell how far their keys are, in the last layer, from those that they write over.
    """

    label: ClassVar[str] = "reuse"
    by_position: ClassVar[bool] = False
    changes: bool = False

    @property
    def results(self) -> Mapping[str, ResultPer]:
        """The relative change of each request's keys, if it is measured."""
        return {KEY_CHANGE: "sequence"} if self.changes else {}

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
        return (_PackedTogether(self),)


def _own_extents(window: Window) -> tuple[tuple[int, int, int, int], ...]:
    shift = window.request.values["shift"]
    return tuple((row, rows, first + shift, before) for row, rows, first, before in window.request.sequence.extents)


@dataclass(frozen=True, slots=True)
class SpanPacked(Packed):
    """A windowed Refresh without a part: Reuse of the whole span."""

    label: ClassVar[str] = "windowed"


class _PackedTogether(KeptTogether):
    """Rows are found by position where keys are stored, and read in order."""

    def __init__(self, policy: Packed) -> None:
        KeptTogether.__init__(self)
        self._policy = policy

    def begin(self, step: StepGraph) -> None:
        """Declare the output with the change of keys."""
        if self._policy.changes:
            self._change = step.g.output(KEY_CHANGE, (step.seqs,), "float32")

    def store(
        self, step: StepGraph, layer: int, norm: Buffer, matrices: dict[str, Bundle], queries: Buffer | None = None
    ) -> None:
        """Compare the last layer's keys with those at their positions, then write over these."""
        if self._policy.changes and layer + 1 == step.arch.layers:
            g, own, ((kv, *extents), place) = step.g, step.arch.stack[layer].attention, self.stored_in(step, layer)
            k = g.buffer("k_compared", (step.tokens, own.kv_width), step.arch.dtype)
            project_rows(step, layer, norm, matrices, {"k": k}, "compared", "compared_in")
            g.add_op(
                "key_change", k, kv, *extents, step.cu_seqlens, step.positions, out=self._change, name="change", layer=place,
                head_size=own.head_size,
            )  # fmt: skip
        KeptTogether.store(self, step, layer, norm, matrices, queries)

    def stored_in(self, step: StepGraph, layer: int) -> KeptIn:
        """Return the state with the extents by positions of the window, and the layer's place."""
        (kv, _, bounds), place = KeptTogether.stored_in(self, step, layer)
        return (kv, step.inputs["own_extents"], bounds), place
