"""Sparse keys: bidirectional models compute a block over the keys that each head has kept (dLLM-Serve, section 4.5).

A Refresh computes the whole canvas, scores its keys by the block's queries, and keeps those with the highest scores. Reuse steps
compute the block alone, over the kept keys and its own. Both decide tokens. A Refresh is for a span of blocks: the candidates are
all positions outside the span, and all of the span's own keys are kept. `mosaic.models.policies.packed_keys` has the steps.

With `sample` or `drift` the span is the answer's side for the whole generation. With `sample` every Refresh after the first is
windowed: it computes the span and a part of the prompt. With `drift` one is left out while keys change little.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import numpy as np

from mosaic.errors import UnknownName, UsageError
from mosaic.models.parts.cache import WHOLE, CachePolicy
from mosaic.models.policies.packed_keys import (
    FEW,
    KEY_CHANGE,
    PACKED,
    PARTS,
    Group,
    Packed,
    Packing,
    Selection,
    SpanPacked,
    Windowed,
)
from mosaic.models.policies.packed_rows import PackedRows
from mosaic.models.policies.policy import BlockStep, Options, Policy, is_integer, is_number, with_parts
from mosaic.models.step import StepSize
from mosaic.registrar.operators.top_keys import fraction_of

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.phase import Phase
    from mosaic.models.state import State

__all__ = ["PACKED", "Keeping", "SparseKeys"]


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
    sample
        Every Refresh after a request's first is windowed: it computes the answer's side, and this share of the rest of the prompt,
        in [0, 1], at least; rounded to one of equal parts, which take turns from the last one on. None: it computes everything.
    drift
        A block's Refresh, except the first, follows its first step, which reuses, and is left out if the keys of that step have
        changed by less than this since they were last kept: the Frobenius norm of the difference by that of the kept keys, over
        the last layer. 0: it is never left out. None: it is the block's first step.
    near
        With `sample` or `drift`, tokens at the prompt's end that belong to the answer's side, at least; the prompt's first never
        does.

    Raises
    ------
    UsageError
        If a value is invalid; the message is one line.

    Examples
    --------
    >>> str(SparseKeys()), str(SparseKeys(retention=0.1, sample=0.125))
    ('sparse', 'sparse(retention=0.1, sample=0.125)')
    """

    word: ClassVar[str] = "sparse"
    retention: float = 0.5
    selection: Selection = "head-centric"
    group: Group = "max"
    pool: int = 3
    interval: int = 1
    delay: int = 0
    sample: float | None = None
    drift: float | None = None
    near: int = 32

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
        if self.sample is not None and not (is_number(self.sample) and 0 <= self.sample <= 1):
            raise UsageError(f"cache: sample is {self.sample!r}; it must be a share of the prompt, in [0, 1].")
        if self.drift is not None and not (is_number(self.drift) and 0 <= self.drift <= sys.float_info.max):
            raise UsageError(
                f"cache: drift is {self.drift!r}; it must be a number of at least 0, relative to kept keys."
            )
        if self.sided and self.delay:
            raise UsageError("cache: a delay computes every block in full; leave out delay, or sample and drift.")
        if not is_integer(self.near, 0):
            raise UsageError(f"cache: near is {self.near!r}; it must be a number of tokens.")
        if not self.sided and "near" in self.changed:
            raise UsageError("cache: near is about the answer's side; give sample or drift too, or leave it out.")

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

    @property
    def sided(self) -> bool:
        """Whether the span is the answer's side."""
        return self.sample is not None or self.drift is not None

    def outside(self, prompt_len: int) -> tuple[int, int]:
        """Return for a prompt, with `sample` or `drift`, the positions before the answer's side, and the parts of these.

        >>> [SparseKeys(sample=share).outside(100) for share in (0, 0.1, 0.4, 1)]
        [(68, 0), (60, 10), (68, 2), (68, 1)]
        """
        positions = max(prompt_len - self.near, 1)
        if not self.sample:
            return positions, 0
        numerator, denominator = fraction_of(self.sample)
        parts = min(denominator // numerator, positions)
        return positions // parts * parts, parts

    def rows(self, length: int, span: int) -> int:
        """Return the rows of the state that a request takes, from the positions of its canvas and of its longest span."""
        return self.kept(length - span) + span

    def steps(
        self, phase: Phase, length: int, block: int, *, answer: int = 0, rows: int = 0, first: Phase | None = None
    ) -> dict[str, StepSize]:
        """Return the sizes of a request's steps by name: "full" with a delay, "refresh", with `sample` "windowed" if there is more
        than one, "reuse", and on a shifted model "reuse_first", of a block that begins without a Refresh, and with `drift` and no
        `sample` "refresh_later".

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
        span, parts = min(block * self.interval, answer or length - 1), 0
        if self.sided:
            outside, parts = self.outside(length - (answer or span))
            span = length - outside
        packed, rows = self.rows(length, span), min(rows or block, block - (first is not None))
        states: dict[State, int] = {PACKED: packed, PARTS: parts}
        begin = phase if first is None else first
        caches: dict[str, CachePolicy] = {"full": WHOLE, "refresh": self.packing}
        found = {}
        for number, name in enumerate([*caches][1 - self.delay :]):
            kind, decided = (begin, rows if first is None else 1) if number == 0 else (phase, rows)
            kind = with_parts(kind, cache=caches[name])
            found[name] = StepSize(phase=kind, windows=(length,), rows=max(decided, 1), states=states)
        later, decided = (begin, rows if first is None else 1) if self.drift is None else (phase, rows)
        if self.sample is not None and answer > block * self.interval:
            window = span + ((length - span) // parts if parts else 0)
            found["windowed"] = StepSize(
                phase=self.renewing(later), windows=(window,), keys=() if parts else (packed,), rows=max(decided, 1),
                states=states,
            )  # fmt: skip
        elif later != begin:
            found["refresh_later"] = replace(found["refresh"], phase=self.renewing(later), rows=max(decided, 1))
        if rows:
            found["reuse"] = StepSize(
                phase=with_parts(phase, cache=self.reusing), windows=(block,), keys=(packed,), rows=rows
            )
        if first is not None and (self.interval > 1 or self.drift is not None):
            kind = with_parts(first, cache=self.reusing)
            found["reuse_first"] = StepSize(phase=kind, windows=(block + 1,), keys=(packed,), rows=1)
        return found

    def times(self, answer: int, block: int, *, shifted: bool = False) -> dict[str, int]:
        """Return how often a generation of `answer` tokens, one a step, takes each of `steps`, by name; with `drift`, if no Refresh
        is left out.

        >>> SparseKeys(interval=2, delay=1).times(256, 32), SparseKeys(sample=0).times(256, 32)
        ({'full': 4, 'refresh': 4, 'reuse': 248}, {'refresh': 1, 'windowed': 7, 'reuse': 248})
        """
        blocks = -(-answer // block)
        refreshes = -(-blocks // self.interval)
        found = {"full": self.delay * refreshes} if self.delay else {}
        later = "windowed" if self.sample is not None else "refresh_later" if shifted and self.drift is not None else ""
        found |= {"refresh": 1, later: refreshes - 1} if later else {"refresh": refreshes}
        first = {}
        if shifted and (self.interval > 1 or self.drift is not None):
            first = {"reuse_first": blocks - (refreshes if self.drift is None else 1)}
        return found | {"reuse": max(answer - sum(found.values()) - sum(first.values()), 0)} | first

    @property
    def packing(self) -> Packing:
        """The cache policy of a Refresh."""
        return Packing(selection=self.selection, group=self.group, pool=self.pool, parts=bool(self.sample))

    @property
    def reusing(self) -> Packed:
        """The cache policy of Reuse."""
        return Packed(changes=self.drift is not None)

    def renewing(self, phase: Phase) -> Phase:
        """Return the phase of a Refresh after a request's first, if the span is the answer's side."""
        if self.sample is None:
            return with_parts(phase, cache=self.packing)
        if not self.sample:
            return with_parts(phase, cache=SpanPacked())
        cache = Windowed(selection=self.selection, group=self.group, pool=self.pool)
        return with_parts(phase, tokens=FEW, cache=cache)


# --- hooks ------------------------------------------------------------------------------------------------------------


class Keeping(Policy):
    """Says of each step whether it refreshes or reuses, and what it computes."""

    def __init__(self, options: SparseKeys, config: Any, arch: Architecture, positions: int) -> None:
        self._options, self._shifted = options, arch.shifted
        self._span: tuple[int, int] | None = None
        self._windowed, self._drifted = 0, options.drift is None

    def phase(self, phase: Phase, step: BlockStep) -> Phase:
        """Reuse what the last Refresh has kept for the block; if nothing, refresh after `delay` full steps of the block. If the
        span is the answer's side, renew it in the first of `interval` blocks: in the first step, or with `drift` in the second."""
        options, covered = self._options, self._span is not None and step.start < self._span[1]
        due = covered and options.sided and self._first_of_interval(step) == step.start
        if due and step.number == int(options.drift is not None) and self._drifted:
            return options.renewing(phase)
        if step.number > options.delay or covered:
            return with_parts(phase, cache=options.reusing)
        return with_parts(phase, cache=WHOLE if step.number < options.delay else options.packing)

    def of_table(self, phase: Phase, step: BlockStep) -> tuple[Phase, int] | None:
        """Mark the first steps of a block, up to its Refresh; they compute the whole canvas if nothing is kept for the block."""
        return with_parts(phase, cache=PackedRows(packing=self._options.packing)), (2 << self._options.delay) - 1

    def tell(self, step: BlockStep, request: Any) -> None:
        """Give the window, and what is kept; on a shifted model the row before the block too, while that predicts its first."""
        cache = step.phase.cache
        if isinstance(cache, Windowed):
            self._renew(step, request.length)
        elif not isinstance(cache, Packed):
            step.window = (0, request.length)
            if isinstance(cache, Packing):
                self._span = self._span_of(step, request.length)
                step.values["spans"] = step.start, step.end, *self._span, self._kept(request.length)
                if self._options.sample:
                    step.values["parts"] = self._options.outside(step.prompt_len)[1]
        else:
            assert self._span is not None, "a Reuse step comes after a Refresh"
            (low, high), kept = self._span, self._kept(request.length)
            step.window = step.start - int(self._shifted and request.mask_array[step.start]), step.end
            if isinstance(cache, SpanPacked):
                step.window = low, high
            step.writes = False  # of no final tokens, so its outcome is noted
            step.key_len, step.values["shift"] = kept + high - low, low - kept

    def take(self, step: BlockStep, request: Any, result: Any) -> None:
        """Note whether the keys of a block's first step have drifted."""
        if self._options.drift is not None and step.number == 0 and isinstance(step.phase.cache, Packed):
            self._drifted = float(result.values[KEY_CHANGE]) >= self._options.drift

    def _renew(self, step: BlockStep, length: int) -> None:
        """Give the positions of a part and of the span; parts take turns, the last one first."""
        low, parts = self._options.outside(step.prompt_len)
        size, part = low // parts, parts - 1 - self._windowed % parts
        step.places = np.concatenate([np.arange(part * size, (part + 1) * size), np.arange(low, length)])
        first = step.start - low + size
        step.values["spans"] = first, first + step.end - step.start, size, size + length - low, self._kept(length)
        step.values["part"] = part
        self._windowed += 1

    def _kept(self, length: int) -> int:
        """The keys that a head keeps of those outside the span."""
        low, high = self._span or (0, 0)
        return self._options.kept(length - (high - low))

    def _span_of(self, step: BlockStep, length: int) -> tuple[int, int]:
        """From the first block that shares the Refresh of a block to the end of the last; with `sample` the answer's side."""
        if self._options.sided:
            return self._options.outside(step.prompt_len)[0], length
        low = self._first_of_interval(step)
        return low, min(low + (step.end - step.start) * self._options.interval, length)

    def _first_of_interval(self, step: BlockStep) -> int:
        """Where the first of the blocks begins that share a Refresh."""
        width = (step.end - step.start) * self._options.interval
        return step.prompt_len + (step.start - step.prompt_len) // width * width
