"""A step as users request it: counts as text, masked rows as a share of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil
from numbers import Real
from typing import Final

from mosaic.errors import UsageError
from mosaic.models.phase import FULL_STEP, Phase
from mosaic.models.state import State
from mosaic.models.step import StepSize
from mosaic.units import Size, parse_lengths, parse_tokens

DEFAULT_MASK_RATIO: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One step to plan. Counts are integers of any kind, or text like "128k".

    Parameters
    ----------
    seq_lens
        Tokens of each packed sequence; in cached phases, of each window. One number is one sequence.
    masked
        Rows to unembed; None for `mask_ratio` of the tokens, rounded up.
    mask_ratio
        Share of masked tokens, in (0, 1].
    logit_rows
        Rows whose logits are returned as well; 0 for statistics only.
    phase
        The kind of step; by default the whole sequence with statistics of its masked rows.
    key_lens
        Cached phases: keys that each window sees, itself included.
    states
        Rows of each state, of all owners together; as for `StepSize`.
    sized
        The step of another context, if that is not this one with other lengths.

    Attributes
    ----------
    size
        The step's size, in numbers.

    Examples
    --------
    >>> Request(seq_lens="1k,512", mask_ratio=0.25).size.rows
    384
    """

    seq_lens: tuple[int, ...]
    masked: int | None = None
    mask_ratio: float = DEFAULT_MASK_RATIO
    logit_rows: int = 0
    phase: Phase = FULL_STEP
    key_lens: tuple[int, ...] = ()
    states: Mapping[State, Size] = field(default_factory=dict, hash=False)
    sized: Callable[[int], StepSize] | None = field(default=None, repr=False, compare=False)
    size: StepSize = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._read_counts()
        if not self.seq_lens:
            raise UsageError("a request needs at least one sequence.")
        ratio = self.mask_ratio
        if self.masked is None and not (isinstance(ratio, Real) and not isinstance(ratio, bool) and 0 < ratio <= 1):
            raise UsageError(f"the mask ratio must be in (0, 1], got {ratio!r}.")
        size = StepSize(
            phase=self.phase, windows=self.seq_lens, keys=self.key_lens, rows=self._rows(sum(self.seq_lens)),
            logit_rows=self.logit_rows, states=self._counts,
        )  # fmt: skip
        object.__setattr__(self, "size", size)

    def _read_counts(self) -> None:
        """Numbers and text to ints."""
        for name, what in (("seq_lens", "a context"), ("key_lens", "a number of keys")):
            object.__setattr__(self, name, parse_lengths(getattr(self, name), what=what))
        for name in ("masked", "logit_rows"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, parse_tokens(value, what=name, least=0))

    @property
    def _counts(self) -> dict[State, int]:
        return {state: parse_tokens(rows, what=state.rows_dim, least=0) for state, rows in self.states.items()}

    def _rows(self, tokens: int) -> int:
        return self.masked if self.masked is not None else max(1, ceil(Fraction(str(self.mask_ratio)) * tokens))

    def at(self, context: int) -> StepSize:
        """Return the step for one sequence of another length: `StepSize.at`, with the share of masked rows kept if they
        were given as a share; or as `sized` says."""
        if self.sized is not None:
            return self.sized(context)
        size = self.size.at(context)
        return size if self.masked is not None else replace(size, rows=self._rows(size.tokens))
