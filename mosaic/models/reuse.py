"""Reuse of what a block attends to of its prefix: how long the output over the prefix is kept. Options, and a preset.

Each step of a block reads all keys before it, though few of its queries have changed since the step before. FlashBlock (arXiv
2602.05305) keeps the attention's output over the prefix, with its log-sum-exp, within a block, and joins it with attention to the
block's own keys, which are new in every step. LoSA (arXiv 2604.12056) does so where states are stable.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mosaic.errors import UsageError

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture

__all__ = ["REUSES", "PrefixReuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReuse:
    """When a block attends to its prefix again. The defaults: in its first step only.

    A step *refreshes* where it attends to the whole prefix, and keeps its output and log-sum-exp, of every layer, head and row;
    other steps *reuse* these. A block's first step refreshes: the block before has become a part of its prefix.

    Parameters
    ----------
    steps
        Steps that an output serves, the one that keeps it among them; None: all steps of a block.
    change
        Also refresh once queries have changed by so much or more: the Frobenius norm of the difference to those of the last
        refresh, over that of these, of all rows that a step forwards, in the last layer that reuses. A step's change is known
        when it has run, so it is the next one that refreshes. None: changes are not measured.

    Raises
    ------
    UsageError
        A value that cannot be, in one line.

    Examples
    --------
    >>> str(PrefixReuse()), str(PrefixReuse(steps=4)), PrefixReuse(steps=4).refreshing(32)
    ('flashblock', 'reuse(steps=4)', 8)
    """

    steps: int | None = None
    change: float | None = None

    def __post_init__(self) -> None:
        steps, change = self.steps, self.change
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise UsageError(
                f"attention: an output over the prefix serves {steps!r} steps; it must be an integer of at least 1, the step "
                "that keeps it."
            )
        number = isinstance(change, int | float) and not isinstance(change, bool)
        if change is not None and not (number and 0 <= change <= sys.float_info.max):
            raise UsageError(
                f"attention: change is {change!r}; it must be a number of at least 0, relative to queries."
            )

    def __str__(self) -> str:
        name = next((name for name, preset in REUSES.items() if preset == self), None)
        given = {"steps": self.steps, "change": self.change}
        return name or f"reuse({', '.join(f'{key}={value}' for key, value in given.items() if value is not None)})"

    def refreshing(self, steps: int) -> int:
        """Return how many of a block's steps refresh, if no change has more of them do so."""
        return 1 if self.steps is None else -(-steps // self.steps)

    def check(self, arch: Architecture) -> None:
        """Check that a model can be attended to so.

        Raises
        ------
        UsageError
            If it attends in both directions.
        """
        if not arch.block:
            raise UsageError(
                "attention: this model attends in both directions, so its keys change in every step and no output over them "
                "outlives one; reuse is for block diffusion (SDAR, LLaDA2.0, Fast-dLLM v2)."
            )


REUSES: Final[Mapping[str, PrefixReuse]] = {"flashblock": PrefixReuse()}
"""By name: FlashBlock, whose outputs serve all steps of a block."""
