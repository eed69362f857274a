"""Reuse of attention outputs in block diffusion: which steps of a block attend to its prefix again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mosaic.models.parts.reused import CHANGE
from mosaic.models.reuse import PrefixReuse
from mosaic.models.sparse import SparseAttention

if TYPE_CHECKING:
    from mosaic.decoding.config import GenerationConfig
    from mosaic.runtime.steps import StepResult

__all__ = ["Refreshes", "reuse_of"]


def reuse_of(config: GenerationConfig) -> PrefixReuse | None:
    """Return when a block's steps attend to its prefix, of layers that keep what they attended to; None: in every step."""
    chosen = config.attention
    if isinstance(chosen, SparseAttention):
        return chosen.reuse
    return chosen if isinstance(chosen, PrefixReuse) else None


class Refreshes:
    """Which steps of one block refresh: the first, as its keys come after those of the block before, and all that options ask for.

    Parameters
    ----------
    config
        Resolved.
    """

    def __init__(self, config: GenerationConfig) -> None:
        self._reuse = reuse_of(config)
        self._step = 0
        self._of: dict[int, int] = {}
        self._changed = False

    def now(self, first: int, end: int) -> bool:
        """Tell whether the next step, which forwards the positions [first, end) of the block, refreshes."""
        if self._reuse is None:
            return False
        oldest = min(self._of.get(position, -1) for position in range(first, end))
        served = self._reuse.steps is not None and self._step - oldest >= self._reuse.steps
        return oldest < 0 or served or self._changed

    def take(self, first: int, end: int, result: StepResult, *, refreshed: bool) -> None:
        """Note what that step has done."""
        if self._reuse is None:
            return
        if refreshed:
            self._of.update(dict.fromkeys(range(first, end), self._step))
        if self._reuse.change is not None:
            self._changed = float(result.values[CHANGE]) >= self._reuse.change
        self._step += 1
