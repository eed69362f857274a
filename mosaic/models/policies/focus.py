"""FOCUS: a cut that keeps the block's tokens whose importance rose from layer 0 to 1, and the tokens they depend on.

`StepRequest.values["block"]` is a request's progress in its block (`BlockProgress`); its window ends in that block. The
number of decoded tokens so far is a row of the state `focus_history`. Tokens before the block, and decided tokens, are
kept. Kept rows attend to keys up to the rightmost position that any step of the block has kept: the first graph
computes the second's `seen`. Legend: T tokens, B sequences, N H queries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mosaic.errors import UsageError
from mosaic.models.inputs import Input
from mosaic.models.kept_keys import attending
from mosaic.models.parts.cut import KEPT, PLACE, Cut, KeptRows
from mosaic.models.policies.focus_options import Eviction
from mosaic.models.policies.policy import BlockStep, Policy, with_parts
from mosaic.models.state import State

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.inputs import Supply, Window
    from mosaic.models.parts.part import ResultPer
    from mosaic.models.phase import Phase
    from mosaic.models.step_graph import Ending, StepGraph
    from mosaic.registrar.graph import Buffer

HISTORY: Final = State(name="focus_history", width=4, dtype="float32", least_rows=1, slot=2)
"""Per request, the number of decoded tokens, as a sum or an average, and the number of steps. Of a request of a table also its
progress (`focus_requests`)."""
REACH: Final = "reach"
"""The key of `StepResult.values` for int32 [1]: the first position after all rows that steps of the block have kept."""
_STATUS_MASKED, _STATUS_UNPROCESSED = 1, 2
_OF_TABLE: Final = ("first", "listed", "block_votes", "status", "progress", "decoded", "history_row")
"""What `focus_requests` finds."""
_ALIKE: Final = 64
"""Up to this many rows, products take as long as reading their weights, on the cards that were measured."""
_TILE: Final = 16
"""Rows of a tile of a product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProgress:
    """A request's progress in its block.

    Parameters
    ----------
    start
        The block's first position.
    masked
        Masked positions, relative to `start`, ascending.
    processed
        Positions from `start` to the rightmost that a step of this block kept: 0 before the first step.
    step
        The number of earlier steps of the block that count: -1 in the prefill (`Eviction.first_step`).
    decoded
        Tokens that the request's previous step decoded; None before the first.
    ranks
        Random eviction only: one number per position of the block; the largest are kept.
    """

    start: int
    masked: tuple[int, ...]
    processed: int
    step: int
    decoded: int | None
    ranks: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Focus(Cut):
    """Keeps the tokens that are likely to be decoded, as `Eviction` says.

    Parameters
    ----------
    eviction
        The options.
    reports
        Whether the step returns `REACH`: needed in shifted models, where the rows to decide do not tell it.
    block
        For a bidirectional model, the length of its windows, each of which is a block. All positions of its sequences
        have keys, which all rows see. 0: the model is block-causal.
    """

    layers: ClassVar[tuple[int, int]] = (0, 1)
    layer: int = field(default=1, init=False)
    eviction: Eviction
    reports: bool = False
    block: int = 0

    def buckets(self, tokens: int) -> Sequence[int]:
        """Return row counts that grow by about an eighth, from an eighth of the tokens on. The second graph's time is
        about proportional to its rows; fewer than `_ALIKE` rows take as long as `_ALIKE`."""
        found = [min(max(-(-tokens // (8 * _TILE)) * _TILE, _ALIKE), tokens)]
        while found[-1] < tokens:
            found.append(min(found[-1] + max(1 << max(found[-1].bit_length() - 4, 0), _TILE), tokens))
        return found

    @property
    def expects(self) -> int:
        """`Eviction.requests`."""
        return self.eviction.requests

    def length(self, arch: Architecture) -> int:
        """Return the length of a block."""
        return self.block or arch.block

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return the blocks' starts, the listed rows and voters, and the rows that may be evicted."""
        return (
            Input(name="first", dtype="int32", per="sequence", value=lambda window: _block(window).start),
            Input(
                name="listed", dtype="int32", per="sequence", width=self.length(arch), value=partial(self._listed, arch),
                joint=True,
            ),
            Input(name="block_votes", dtype="uint8", per="token", value=self._votes, joint=True),
            Input(name="status", dtype="uint8", per="token", value=self._status, joint=True),
            Input(name="progress", dtype="int32", per="sequence", value=self._progress),
            Input(name="decoded", dtype="int32", per="sequence", value=self._decoded),
            Input(
                name="history_row", dtype="int64", per="sequence",
                value=lambda window: window.request.states[HISTORY].runs(0, 1)[0][0],
            ),
            *((self._ranks(self.length(arch)),) if self.eviction.rank == "random" else ()),
        )  # fmt: skip

    def _ranks(self, length: int) -> Input:
        return Input(
            name="ranks", dtype="float32", per="sequence", width=length, value=lambda window: _block(window).ranks
        )

    def _listed(self, arch: Architecture, windows: Sequence[Window]) -> NDArray[np.int32]:
        found = np.tile(np.arange(self.length(arch), dtype=np.int32), (len(windows), 1))
        if self.eviction.importance == "masked":
            masked = _Masked.of(windows)
            found[:] = -1
            found[masked.window, masked.number] = masked.offset
        return found

    def _votes(self, windows: Sequence[Window]) -> NDArray[np.uint8]:
        offsets = _offsets(windows)
        if self.eviction.importance == "block":
            return (offsets >= 0).astype(np.uint8)
        found = np.zeros(len(offsets), dtype=np.uint8)
        found[_Masked.of(windows).rows(offsets, windows)] = 1
        return found

    def _status(self, windows: Sequence[Window]) -> NDArray[np.uint8]:
        offsets, masked = _offsets(windows), _Masked.of(windows)
        blocks = [_block(window) for window in windows]
        processed = np.array([block.processed for block in blocks])
        evicts = np.array([block.step >= (self.eviction.first_step == "whole") for block in blocks])
        status = np.where(masked.offset < processed[masked.window], _STATUS_MASKED, _STATUS_UNPROCESSED)
        found = np.zeros(len(offsets), dtype=np.uint8)
        found[masked.rows(offsets, windows)] = status * evicts[masked.window]
        return found

    def _decoded(self, window: Window) -> int:
        block = _block(window)
        begins = block.decoded is None or (self.eviction.history == "block" and block.step <= 0)
        return -1 if begins else int(block.decoded or 0)

    def _progress(self, window: Window) -> int:
        return _block(window).processed if self.eviction.reach == "block" else 0

    @property
    def states(self) -> Sequence[State]:
        """The history."""
        return (HISTORY,)

    def of_table(self, step: StepGraph, served: Mapping[str, Buffer]) -> Mapping[str, Supply]:
        """Return the inputs of the first graph, except ranks."""
        found: dict[str, Buffer] = {}

        def supply(name: str) -> Buffer:
            if not found:
                eviction = self.eviction
                asked = step.g.add_op(
                    "focus_requests", *(served[one] for one in ("requests", "canvas")), step.state(HISTORY),
                    *(served[one] for one in ("served", "cu_seqlens", "positions")), name="focus",
                    block=self.length(step.arch), importance=eviction.importance, reach=eviction.reach,
                    history=eviction.history, **self._noted(),
                )  # fmt: skip
                found.update(zip(_OF_TABLE, asked, strict=True))
            return found[name]

        return {} if step.phase.graph == "suffix" else {name: partial(supply, name) for name in _OF_TABLE}

    def note(self, end: Ending, served: Mapping[str, Buffer]) -> None:
        """Note what was kept and decided."""
        where = (served[name] for name in ("served", "cu_seqlens", "cu_rows"))
        seen = end.g.carry("focus_seen", (served["served"].shape[0],), "int32")
        end.g.add_op(
            "note_focus", served["requests"], HISTORY.register(end.g, end.arch), *where, seen, end.g["committed"],
            name="note_focus", **self._noted(),
        )  # fmt: skip

    def _noted(self) -> dict[str, Any]:
        return {"own": HISTORY.own_column, "processed": self.block, "first_step": self.eviction.first_step}

    def check(self, request: Any, arch: Architecture) -> None:
        """Check that the model can be cut this way, and that a request states its progress, with a window that contains
        its masked positions and ends in its block."""
        self.eviction.check(arch, dual=self.block > 0)
        block, length = request.values.get("block"), self.length(arch)
        if not isinstance(block, BlockProgress):
            raise UsageError('eviction: a request needs its progress in the block: values={"block": BlockProgress(…)}.')
        places = request.values.get("positions")
        end = request.start + request.token_ids.numel()
        found = range(request.start, end) if places is None else places.tolist()
        masked = [block.start + offset for offset in block.masked]
        if found[-1] >= block.start + length or not {*found}.issuperset(masked):
            raise UsageError(
                f"eviction: a window ends in its request's block, which is [{block.start}, {block.start + length}), and has "
                f"its masked positions {masked}; got {[*found]}."
            )
        if len(block.ranks) != (length if self.eviction.rank == "random" else 0):
            raise UsageError(
                f"eviction: rank='random' takes a number for each of the block's {length} positions, others none; got "
                f"{len(block.ranks)}."
            )
        behind = self.eviction.first_step != "evicts" or not masked or block.masked[0] + len(masked) == length
        if not (block.step or block.processed or behind):
            raise UsageError(
                f"eviction: masks {masked} stand before decided tokens, which would see their unwritten keys; "
                "compute the block whole first (first_step='whole')."
            )

    def declare(self, step: StepGraph) -> None:
        """Ask for all inputs."""
        for entry in self.inputs(step.arch):
            step.inputs[entry.name]

    def observe(self, step: StepGraph, layer: int, q: Buffer) -> None:
        """Register the importance of the block's positions in the first two layers."""
        arch, inputs = step.arch, step.inputs
        if layer in self.layers:
            where = step.kv, inputs["extents"], inputs["cu_extents"], step.cu_seqlens
            step.g.add_op(
                "token_importance", q, *where, inputs["block_votes"], inputs["first"], inputs["listed"], name="importance",
                **attending(arch, layer), pool=self.eviction.pool,
            )  # fmt: skip

    def select(self, step: StepGraph, into: KeptRows) -> None:
        """Register the choice of rows, and the number of keys that they see."""
        chosen, inputs = self.eviction, step.inputs
        before, after = (step.g[f"layers.{layer}/importance"] for layer in self.layers)
        of_block = (inputs[name] for name in ("listed", "first", "progress", "status"))
        ranks = inputs["ranks"] if chosen.rank == "random" else None
        of_request = inputs["decoded"], inputs["history_row"], step.state(HISTORY), ranks
        step.g.add_op(
            "evict_tokens", before, after, *of_block, step.positions, step.cu_seqlens, *of_request,
            out=(*into, self._seen(step)), name="evict", alpha=chosen.alpha, history=chosen.history, threshold=chosen.threshold,
            placeholders=chosen.placeholders, weight=chosen.weight, keep=chosen.keep,
            rank="bottom" if chosen.rank == "bottom" else "importance",
        )  # fmt: skip

    def supplied(self, step: StepGraph) -> Mapping[str, Supply]:
        """Return the number of keys that each sequence sees in the second graph: of all sequences, or with sparse
        attention of the sequences that attend to all keys."""
        if step.first_graph or self.block:
            return {}
        told = {name: partial(self._seen_of, step, name) for name in ("seen_exactly", "seen_sparsely")}
        return {"seen": lambda: self._seen(step), **told}

    def _seen_of(self, step: StepGraph, name: str) -> Buffer:
        seen: Buffer = step.g.add_op("minimum", step.inputs.given(name), self._seen(step), name=f"kept_{name}")
        return seen

    def finish(self, step: StepGraph) -> None:
        """Return `REACH`, if it is reported."""
        if self.reports:
            step.g.add_op("copy", self._seen(step), out=step.g.output(REACH, (step.seqs,), "int32"), name="report")

    @property
    def results(self) -> Mapping[str, ResultPer]:
        """Return the place of each row to decide, and `REACH`, if it is reported."""
        return {PLACE: "row", **({REACH: "sequence"} if self.reports else {})}

    def _seen(self, step: StepGraph) -> Buffer:
        return step.g.carry("focus_seen", (step.seqs,), "int32")


class _Masked(NamedTuple):
    """The masked positions of blocks, concatenated: each one's window, its index among the window's, and its offset
    from the block's start."""

    window: NDArray[np.intp]
    number: NDArray[np.intp]
    offset: NDArray[np.intp]

    @classmethod
    def of(cls, windows: Sequence[Window]) -> _Masked:
        """Return the masked positions of the windows' requests."""
        masked = [_block(window).masked for window in windows]
        counts = [len(found) for found in masked]
        firsts = np.repeat([0, *accumulate(counts[:-1])], counts)
        offset = np.fromiter(chain.from_iterable(masked), np.intp, sum(counts))
        return cls(np.repeat(np.arange(len(windows)), counts), np.arange(len(offset)) - firsts, offset)

    def rows(self, offsets: NDArray[np.intp], windows: Sequence[Window]) -> NDArray[np.intp]:
        """Return the row number in the step of each masked position; windows contain all of theirs, ascending."""
        lengths = [window.length for window in windows]
        apart = 2 * max(int(np.abs(offsets).max()), 1) + 2  # separates the windows in one sorted array
        keys = offsets + apart * np.repeat(np.arange(len(windows)), lengths)
        return keys.searchsorted(self.offset + apart * self.window)


def _offsets(windows: Sequence[Window]) -> NDArray[np.intp]:
    """The offset of each token of the step from its block's start."""
    given = [window.request.values.get("positions") for window in windows]
    parts = [
        range(window.start, window.end) if at is None else at.tolist()
        for window, at in zip(windows, given, strict=True)
    ]
    lengths = [*map(len, parts)]
    starts = np.repeat([_block(window).start for window in windows], lengths)
    found: NDArray[np.intp] = np.fromiter(chain.from_iterable(parts), np.intp, sum(lengths)) - starts
    return found


def _block(window: Window) -> BlockProgress:
    found: BlockProgress = window.request.values["block"]
    return found


# --- hooks ------------------------------------------------------------------------------------------------------------


class Evicting(Policy):
    """Cuts the steps of a block, and tracks the request's progress in it.

    In a bidirectional model all positions have keys, and every step evicts.
    """

    def __init__(self, options: Eviction, config: Any, arch: Architecture, positions: int) -> None:
        dual, block = not arch.block, config.block_length or 0
        self._eviction = replace(options, first_step="evicts") if dual else options
        # where row i-1 predicts position i, the rows to decide do not say whether a block's last position was kept
        self._cut = Focus(eviction=self._eviction, reports=arch.shifted, block=block if dual else 0)
        self._hides = options.reach == "step"
        self.within = not (self._hides and config.block_commit == "cached")
        self.tabled = options.rank != "random" and not dual
        self._begun = -1
        self._step, self._processed = 0, 0
        self._decided: int | None = None
        if config.remasking == "random":
            raise UsageError(
                "eviction: 'random' chooses rows before a step runs, and eviction may drop them; leave one out."
            )
        if config.remasking == "sequential":
            raise UsageError(
                "eviction: 'sequential' decides the first masks, and eviction may drop them; leave one out."
            )
        if not dual and config.small_block_length not in (None, config.block_length):
            raise UsageError(
                "eviction: importance says which of a block's tokens are decided, not small blocks of "
                f"{config.small_block_length}; leave small_block_length out."
            )

    def phase(self, phase: Phase, step: BlockStep) -> Phase:
        """Cut the step, unless it writes final keys."""
        if step.writes:
            return phase
        if not any(way.cuts for way in phase.cache.ways()):
            raise UsageError("eviction: dropped rows keep no output over their prefix to reuse; leave one out.")
        return with_parts(phase, cut=self._cut)

    def tell(self, step: BlockStep, request: Any) -> None:
        """State the request's progress in the block; keys of frozen tokens after the computed ones are not seen."""
        if self._hides and step.places is not None:
            step.key_len = int(step.places[-1]) + 1
        if step.writes:
            return
        if step.start != self._begun:
            prefills = self._eviction.first_step == "prefill" and step.start < step.prompt_len
            self._begun, self._step = step.start, -1 if prefills else 0
            self._processed = self._cut.block
        step.counts = self._step >= 0
        masked = request.open_rows(step.start, step.end) - step.start
        ranks = request.uniforms(step.start, step.end) if self._eviction.rank == "random" else ()
        step.values["block"] = BlockProgress(
            start=step.start, masked=tuple(masked.tolist()), processed=self._processed, step=self._step, decoded=self._decided,
            ranks=ranks,
        )  # fmt: skip

    def take(self, step: BlockStep, request: Any, result: Any) -> None:
        """Record the rows kept and the number of tokens decided."""
        if step.counts:
            self._processed = max(self._processed, self._reach(step, request, result) - step.start)
            self._decided = int(result.committed.sum())
        self._step += 1

    def _reach(self, step: BlockStep, request: Any, result: Any) -> int:
        """One past the rightmost position that the step kept. It is a masked one, or a decided one, which are all kept;
        positions decided by a step of the block lie before the rightmost kept position."""
        if REACH in result.values:
            return int(result.values[REACH])
        kept = result.values[KEPT].numpy().nonzero()[0]
        reach = int(step.positions[kept[-1]]) + 1 if len(kept) else step.start
        if self._step == 0:
            known = (~request.mask_array[step.start : step.end]).nonzero()[0]
            reach = max(reach, step.start + int(known[-1]) + 1) if len(known) else reach
        return reach
