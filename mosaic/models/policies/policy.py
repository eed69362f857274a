"""The interface of a policy: its options, and hooks that change the steps of a block.

A policy changes the phase of a step (`Policy.phase`). The parts that it adds bring states, inputs, sizes and options of
attention. `tell` adds the request values that the parts need, and `take` records an outcome. Algorithms, sessions and
the engine call these hooks, and know no policy by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mosaic.registrar.request_table import MARKED_STEPS

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.phase import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a policy in a request; a preset is named by text.

    Attributes
    ----------
    word, adjective
        How `str` names options that are no preset, and how reports name the policy's steps.
    """

    word: ClassVar[str] = ""
    adjective: ClassVar[str] = ""

    @classmethod
    def presets(cls) -> Mapping[str, Self]:
        """Return the presets by name."""
        return {}

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of options that can be changed."""
        return tuple(entry.name for entry in fields(cls))

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """Return a copy with options set by name.

        Raises
        ------
        UsageError
            If a value is invalid, or an option does not apply.
        """
        return replace(self, **options)

    def joined(self, other: Options) -> Self | None:
        """Return the combination of this policy's options and another's; None: they cannot be combined."""
        return None

    def within_block(self, block: int) -> Self:
        """Return options with the same effect on blocks of this many tokens, with numbers no larger than useful."""
        return self

    def kinds(self, steps: int) -> list[str]:
        """Return a word per step of a block, for reports: "first", "later", or another."""
        return ["later" if step else "first" for step in range(steps)]

    def of_one_request(self) -> Self:
        """Return options for a request that is alone, if they do not state the expected number of requests."""
        return self

    def check(self, arch: Architecture, *, dual: bool = False) -> None:
        """Raise a `UsageError` if the model does not support the options; `dual`: with a dual cache."""

    def shown(self, value: object) -> str:
        """Return a value as `str` writes it."""
        return str(value)

    @property
    def changed(self) -> dict[str, Any]:
        """The options that are not the defaults."""
        return {entry.name: value for entry in fields(self) if (value := getattr(self, entry.name)) != entry.default}

    def __str__(self) -> str:
        name = next((name for name, preset in self.presets().items() if preset == self), None)
        return name or f"{self.word}({', '.join(f'{key}={self.shown(value)}' for key, value in self.changed.items())})"


@dataclass(slots=True, kw_only=True)
class BlockStep:
    """One step of a block before it runs: the request of its algorithm, which policies change.

    Attributes
    ----------
    start, end
        The block.
    number, steps
        Steps of the block so far, and its planned number of steps.
    window
        Positions that are computed, unless `places` lists them.
    writes
        Whether the step writes the keys of final tokens: it prefills, or ends a block.
    prompt_len, prefix
        Tokens of the prompt, and tokens of its whole blocks.
    phase
        The kind of step.
    positions
        Positions to decide, int64 [M].
    places
        The positions that are computed, int64 [T], ascending; None: the whole window.
    key_len
        Keys that the step sees; 0: up to the window's end.
    values
        By name, the request values that parts of the phase need.
    counts
        Whether policies count it as a step of the block.
    """

    start: int
    end: int
    number: int
    steps: int
    window: tuple[int, int]
    writes: bool = False
    prompt_len: int = 0
    prefix: int = 0
    phase: Phase = field(init=False)
    positions: NDArray[np.int64] = field(init=False)
    places: NDArray[np.int64] | None = None
    key_len: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    counts: bool = True


class Policy:
    """Changes the steps of one request, beside its algorithm.

    One is made per request, and keeps state of it. Hooks are called in the order of the registry.

    Parameters
    ----------
    options
        The policy's own.
    config, arch
        The request's `GenerationConfig`, resolved, and the model's sizes. A contradiction between them and the options
        raises `UsageError`.
    positions
        Length of the request's canvas; 0: not known yet.

    Attributes
    ----------
    within
        Whether the first step of a block may write the final keys of the block before.
    tabled
        Whether requests of a table can have it: its parts find their inputs there (`Part.of_table`), and `tell` and `take` are not
        called.
    """

    within: bool = True
    tabled: bool = False

    def __init__(self, options: Any, config: Any, arch: Architecture, positions: int) -> None:
        """Check the options beside the request's others."""

    def phase(self, phase: Phase, step: BlockStep) -> Phase:
        """Return the phase of a step; before anything has run, it depends on the step's number alone."""
        return phase

    def of_table(self, phase: Phase, step: BlockStep) -> tuple[Phase, int] | None:
        """Return the phase of the steps of a table's requests, and the bits of the steps of a block that it marks (`Column.MARKS`),
        by the first step of one; None: they cannot have the policy."""
        return (self.phase(phase, step), 0) if self.tabled else None

    def tell(self, step: BlockStep, request: Any) -> None:
        """Add what the step's parts need: to `step.values`, or by setting `places`, `key_len` or `counts`.

        `request` is the canvas: `mask_array`, `open_rows(start, end)`, `uniforms(start, end)`.
        """

    def take(self, step: BlockStep, request: Any, result: Any) -> None:
        """Record an outcome, a `StepResult`, before the canvas takes its decisions."""


@lru_cache(maxsize=1024)
def with_parts(phase: Phase, **parts: Any) -> Phase:
    """Return the phase with other parts, cached: the same object every time."""
    return replace(phase, **parts)


def marks_of(marked: Callable[[int], bool], block: int) -> int | None:
    """Return the bits of the marked steps of a block; None if its steps are too many, and the last bit does not stand for all of
    them.

    >>> bin(marks_of(lambda step: step % 3 == 0, 8)), marks_of(lambda step: step % 3 == 0, 128)
    ('0b1001001', None)
    """
    if len({marked(step) for step in range(MARKED_STEPS, block)}) > 1:
        return None
    return sum(1 << step for step in range(min(block, MARKED_STEPS + 1)) if marked(step))


def is_integer(value: object, least: int) -> bool:
    """Return whether an option is an integer of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> bool:
    """Return whether an option is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)
