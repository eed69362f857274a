"""Token eviction and frozen tokens in block diffusion: what each step of a block is asked beside what it decides.

A step computes the tokens of its block but those that are frozen: decided long enough for their keys to stay (FOCUS, section
4.3). With eviction the step itself drops some of these after two layers, and says which. All of this the host knows from
outcomes, so requests at any progress share steps of one phase.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mosaic.kernels.shared.sampling import uniforms
from mosaic.models.eviction import Eviction
from mosaic.models.parts.cut import KEPT
from mosaic.models.parts.focus import REACH, BlockProgress, Focus
from mosaic.models.parts.windows import APART

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mosaic.decoding.canvas import Canvas, Positions
    from mosaic.decoding.config import GenerationConfig
    from mosaic.models.phase import Phase
    from mosaic.models.step import StepSize
    from mosaic.runtime.steps import StepResult

__all__ = ["Progress", "computing", "expected_step", "hides", "never_evicting"]


def computing(phase: Phase, config: GenerationConfig, *, shifted: bool = False, dual: bool = False) -> Phase:
    """Return the phase of a block's steps: which tokens their windows have, and where they are cut.

    `dual`: of a model that attends in both directions, over a dual cache; all positions have keys, so every such step evicts.
    Where row i-1 predicts position i (`shifted`), the rows to decide do not say whether a block's last position was kept.
    """
    if config.block_cache is not None:
        phase = replace(phase, tokens=APART)
    if isinstance(config.eviction, Eviction):
        eviction = replace(config.eviction, first_step="evicts") if dual else config.eviction
        block = config.block_length or 0 if dual else 0
        phase = replace(phase, cut=Focus(eviction=eviction, reports=shifted, block=block))
    return phase


def expected_step(config: GenerationConfig, largest: Sequence[StepSize]) -> StepSize | None:
    """Return a step of one block of as many requests as the eviction expects to share it; None where it expects nothing.

    Parameters
    ----------
    largest
        The largest steps of one request.
    """
    eviction = config.eviction
    cut = [size for size in largest if size.phase.cut is not None]
    if not isinstance(eviction, Eviction) or not eviction.requests or not cut:
        return None
    size, count, block = cut[-1], eviction.requests, config.block_length or 1
    return replace(
        size, windows=(block,) * count, keys=size.keys * count, owned=size.owned * count, extents=0,
        rows=min(size.rows, block) * count, states={},
    )  # fmt: skip


def hides(config: GenerationConfig) -> bool:
    """Return whether tokens of a block that are frozen are not seen where a step computes none behind them."""
    return isinstance(config.eviction, Eviction) and config.eviction.reach == "step"


def never_evicting(config: GenerationConfig) -> GenerationConfig:
    """Return the same options without eviction and block cache."""
    return replace(config, eviction=None, block_cache=None, block_commit=None)


@dataclass(slots=True)
class Progress:
    """How far a request is in its block.

    Parameters
    ----------
    canvas
        The request's.

    Attributes
    ----------
    start
        The block's first position.
    step
        Steps of the block so far; -1 before one that counts for nothing (`Eviction.first_step`).
    processed
        With eviction, positions from `start` to the rightmost that a step of the block has kept.
    decoded
        Tokens that the request's last step has decided; None before its first.
    frozen
        bool [N], the tokens that are computed no more.
    """

    canvas: Canvas
    start: int = 0
    step: int = 0
    processed: int = 0
    decoded: int | None = None
    frozen: NDArray[np.bool_] = field(init=False)
    _followed: bool = field(init=False)

    def __post_init__(self) -> None:
        config = self.canvas.config
        self.frozen = np.zeros(self.canvas.length, dtype=bool)
        self._followed = config.eviction is not None or config.block_cache is not None

    def enter(self, start: int, *, processed: int = 0) -> None:
        """Begin the block at `start`, of which so many positions have keys: the one before it is final."""
        self.start, self.step, self.processed = start, 0, processed
        eviction = self.canvas.config.eviction
        if isinstance(eviction, Eviction) and eviction.first_step == "prefill" and start < self.canvas.prompt_len:
            self.step = -1
        if self.canvas.config.block_commit != "cached":
            self.frozen[:start] = False

    def places(self, first: int, end: int) -> NDArray[np.int64] | None:
        """Return the positions in [first, end) that are computed; None where all are."""
        if self.canvas.config.block_cache is None:
            return None
        return (~self.frozen[first:end]).nonzero()[0] + first

    def key_len(self, places: NDArray[np.int64] | None, end: int) -> int:
        """Return how many keys a step sees that computes these positions, of a block that ends at `end`."""
        return int(places[-1]) + 1 if places is not None and hides(self.canvas.config) else end

    def values(self, masked: NDArray[np.int64] | None = None) -> dict[str, Any]:
        """Return what the next step has to know of the block; `masked`, its masked positions, if they are known."""
        eviction = self.canvas.config.eviction
        if not isinstance(eviction, Eviction):
            return {}
        end = self.start + (self.canvas.config.block_length or 0)
        offsets = (self.canvas.open_array(self.start, end) if masked is None else masked) - self.start
        ranks = uniforms(self.canvas.keys(torch.arange(self.start, end))) if eviction.rank == "random" else ()
        return {
            "block": BlockProgress(
                start=self.start, masked=tuple(offsets.tolist()), processed=self.processed, step=self.step, decoded=self.decoded,
                ranks=tuple(map(float, ranks)),
            )
        }  # fmt: skip

    def take(self, window: tuple[int, int], positions: Positions, result: StepResult) -> None:
        """Note what a step has computed, before the canvas takes what it has decided.

        Parameters
        ----------
        window
            Of the step; of this all positions that are not frozen were computed.
        positions
            Those that it was to decide.
        """
        if not self._followed:
            return
        if self.step < 0:
            self.step = 0
            return
        if KEPT in result.values:
            self.processed = max(self.processed, self._reach(positions, result) - self.start)
        if self.canvas.config.block_cache is not None:
            self._freeze(*window)
        self.step += 1
        self.decoded = int(np.count_nonzero(result.array("committed")))

    def _reach(self, positions: Positions, result: StepResult) -> int:
        """The position after the rightmost that the step has kept: a masked one, or a decided one, which all are. Those that were
        decided by a step of the block lie before the rightmost that this step has kept."""
        if REACH in result.values:
            return int(result.values[REACH])
        kept = result.array(KEPT).nonzero()[0]
        reach = int(positions[kept[-1]]) + 1 if len(kept) else self.start
        if self.step == 0:
            known = (
                ~self.canvas.mask_array[self.start : self.start + (self.canvas.config.block_length or 0)]
            ).nonzero()[0]
            reach = max(reach, self.start + int(known[-1]) + 1) if len(known) else reach
        return reach

    def _freeze(self, first: int, end: int) -> None:
        """Freeze tokens that the step has computed as decided ones, and whose right neighbour was decided where that counts."""
        if self.canvas.config.block_cache == "dc":
            self.frozen[first:end] |= ~self.canvas.mask_array[first:end]
            return
        # the block's last token has no neighbour
        beyond = min(end + 1, self.start + (self.canvas.config.block_length or 0))
        decided = ~self.canvas.mask_array[first:beyond]
        decided[:-1] &= decided[1:]
        self.frozen[first:end] |= decided[: end - first]
