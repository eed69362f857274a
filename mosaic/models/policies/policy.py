"""What a policy is: its options, and the hooks by which the steps of a block are asked for.

A policy changes the phase of a step (`Policy.phase`). The parts that it puts there bring its states, inputs and sizes, and the way
in which attention runs. It says of a request what they need (`tell`), and takes note of an outcome (`take`). Algorithms, sessions
and the engine call these hooks, and know no policy by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.phase import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a policy, as a request gives them; a preset is named by text.

    Attributes
    ----------
    word, adjective
        What `str` calls options that are no preset, and what reports call steps by them.
    """

    word: ClassVar[str] = ""
    adjective: ClassVar[str] = ""

    @classmethod
    def presets(cls) -> Mapping[str, Self]:
        """Return the options that have names."""
        return {}

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return what may be changed of a preset, by name."""
        return tuple(entry.name for entry in fields(cls))

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """Return the same with options by name.

        Raises
        ------
        UsageError
            If a value cannot be, or there is nothing that it is an option of.
        """
        return replace(self, **options)

    def joined(self, other: Options) -> Self | None:
        """Return the policy that this one and another are together; None: they do not go together."""
        return None

    def within_block(self, block: int) -> Self:
        """Return what does the same to blocks of some tokens, by numbers that are no larger than there is use for."""
        return self

    def kinds(self, steps: int) -> list[str]:
        """Return what each step of a block is, for reports: "first", "later", or another word."""
        return ["later" if step else "first" for step in range(steps)]

    def of_one_request(self) -> Self:
        """Return the same for a request that is alone, where options do not say how many are expected."""
        return self

    def check(self, arch: Architecture, *, dual: bool = False) -> None:
        """Raise a `UsageError` if a model cannot run so; `dual`: with a dual cache."""

    def shown(self, value: object) -> str:
        """Return how `str` writes a value."""
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
    """One step of a block before it runs: what its algorithm asks for, and what policies make of it.

    Attributes
    ----------
    start, end
        The block.
    number, steps
        Steps of the block so far, and how many it is to take.
    window
        Positions that are computed, but where `places` says which.
    writes
        The step writes the keys of final tokens: it prefills, or ends a block.
    prompt_len, prefix
        Tokens of the prompt, and those of its whole blocks.
    phase
        The kind of step.
    positions
        What it is to decide, int64 [M].
    places
        The positions that are computed, int64 [T], ascending; None: the whole window.
    key_len
        Keys that it sees; 0: as many as the window's end.
    values
        By name, what parts of the phase need of the request.
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
    """How the steps of one request are asked for, beside what its algorithm decides.

    It is made when a request is described, and keeps what it has to remember of it. Hooks are called in the order of the registry.

    Parameters
    ----------
    options
        Its own.
    config, arch
        The request's `GenerationConfig`, resolved, and the model's sizes. Where these and the options do not go together, it is a
        `UsageError`.
    positions
        Of the request's canvas; 0: not known yet.

    Attributes
    ----------
    waits
        Why a step cannot be asked for before the outcome of the one before it is known; empty: it can.
    within
        Whether the first step of a block may write the final keys of the block before.
    """

    waits: str = ""
    within: bool = True

    def __init__(self, options: Any, config: Any, arch: Architecture, positions: int) -> None:
        """Check the options beside the request's others."""

    def phase(self, phase: Phase, step: BlockStep) -> Phase:
        """Return the phase of a step, by what its algorithm asks for; before anything has run, by the step's number alone."""
        return phase

    def tell(self, step: BlockStep, request: Any) -> None:
        """Say what the step's parts need of the request: add to `step.values`, or set `places`, `key_len` or `counts`.

        `request` is the canvas: `mask_array`, `open_array(start, end)`, `uniforms(start, end)`.
        """

    def take(self, step: BlockStep, request: Any, result: Any) -> None:
        """Take note of an outcome, a `StepResult`, before the canvas takes what it has decided."""


@lru_cache(maxsize=1024)
def with_parts(phase: Phase, **parts: Any) -> Phase:
    """Return the phase with other parts: the same object whenever it is asked for."""
    return replace(phase, **parts)


def is_integer(value: object, least: int) -> bool:
    """Return whether an option is an integer of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> bool:
    """Return whether an option is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)
