"""Block diffusion over a canvas on the device: a step is launched before the host knows what the one before it decided.

The tokens, and what becomes of them, are those of `sdar.decode`. There each step waits for the host to read the last one's
decisions and to pack them into the next step's inputs. Here steps read their windows from a canvas on the device and write
their decisions to it, so the next step needs nothing that the host does not know before: which block, and how many tokens
the schedule commits. All rows of a block are unembedded in each of its steps, as which of them are open is known on the
device only.

Where a rule takes as many tokens as it likes, the host has to guess whether the block will be done. A wrong guess costs a
step that decides nothing; it is launched, and its outcome is not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from mosaic.decoding.canvas import COMMIT, cached_shape, whole_blocks
from mosaic.decoding.noise import row_keys
from mosaic.decoding.selecting import attending, selection
from mosaic.models.parts.windows import CANVAS, ENTERED, OPEN, STAYING

if TYPE_CHECKING:
    from mosaic.decoding.canvas import Canvas, Sampling, Shapes, Steps
    from mosaic.decoding.config import GenerationConfig
    from mosaic.models.phase import Phase
    from mosaic.runtime.steps import StepRequest

__all__ = ["ahead_shapes", "decode_ahead"]

STAYS: Final = OPEN - 1
"""Of a window that enters the canvas: a token that is there already."""


def decode_ahead(canvas: Canvas, phase: Phase, sampling: Sampling, quotas: Sequence[int], *, exactly: bool) -> Steps:
    """Decode one request, whose blocks are denoised by steps of a phase.

    Parameters
    ----------
    quotas
        What the steps of a block commit: at least, as their rule may take more, or exactly.
    """
    block = canvas.config.block_length or 0
    prefix, length = whole_blocks(canvas.config, canvas.prompt_len)
    if prefix:
        yield canvas.fill(0, prefix)
    asked = _Requests(canvas, phase, sampling, quotas)
    taken = steps = 0
    for number, start in enumerate(range(prefix, length, block)):
        canvas.block = number
        positions, open_ = asked.positions(start), canvas.masked[start : start + block]
        for step, quota in enumerate(quotas):
            left, last = int(open_.sum()), start + block == length
            expected = quota if exactly else max(quota, taken // max(steps, 1))
            request = asked.request(number, start, step)
            if left <= quota:
                canvas.following = None if last else asked.request(number + 1, start + block, 0, later=1)
            elif left > expected:
                canvas.following = asked.request(number, start, step + 1, later=1)
            result = yield request
            # by what stands there: a step before it may have been interrupted on the host, and decided on the device
            committed = canvas.masked[positions] & (result.chosen != OPEN)
            canvas.take(positions, replace(result, committed=committed))
            taken, steps = taken + left - int(open_.sum()), steps + 1
            if canvas.finished:
                return
            if not open_.any():
                break


class _Requests:
    """The requests of one canvas. Those that are alike are one object, which is packed once."""

    def __init__(self, canvas: Canvas, phase: Phase, sampling: Sampling, quotas: Sequence[int]) -> None:
        self._canvas, self._sampling, self._quotas = canvas, sampling, quotas
        self._phases = [
            attending(replace(phase, tokens=STAYING if step else ENTERED), canvas.config, step)
            for step in range(len(quotas))
        ]
        self._block = canvas.config.block_length or 0
        self._made: dict[tuple[int, int, Phase, int], StepRequest] = {}

    def positions(self, start: int) -> Tensor:
        """Return the positions of a block that are ever decided, int64."""
        return torch.arange(max(start, self._canvas.prompt_len), start + self._block)

    def request(self, number: int, start: int, step: int, *, later: int = 0) -> StepRequest:
        """Return the request for a step of a block, which is so many steps later than the one that comes next."""
        canvas, phase = self._canvas, self._phases[step]
        now = canvas.step + later
        key = number, self._quotas[step] if step else 0, phase, now if phase.noisy or not step else 0
        if key not in self._made:
            if step == 0:
                self._made.clear()
            self._made[key] = self._make(phase, number, start, step, now)
        return self._made[key]

    def _make(self, phase: Phase, number: int, start: int, step: int, now: int) -> StepRequest:
        canvas, end = self._canvas, start + self._block
        first = start - self._block if step == 0 and number else start
        positions = self.positions(start)
        made = canvas.ask(
            phase, positions, window=(first, end), sampling=self._sampling, quota=self._quotas[step],
            threshold=canvas.config.threshold or 0.0, values=selection(canvas, start, step),
        )  # fmt: skip
        if phase.noisy:
            made = replace(made, keys=row_keys(canvas.config.seed, canvas.request, now, positions))
        if step:
            return made
        entered = torch.full((end - first,), STAYS)
        entered[start - first :] = canvas.tokens[start:end].masked_fill(canvas.masked[start:end], OPEN)
        return replace(made, values={**made.values, "entered": entered})


def ahead_shapes(config: GenerationConfig, phase: Phase, prompt_len: int) -> Shapes:
    """Return the prefill, and of the last block the first step and a later one."""
    block = config.block_length or 0
    prefix, length = whole_blocks(config, prompt_len)
    first, rows = (2 * block, block) if length - prefix > block else (block, length - prompt_len)
    found = [cached_shape(COMMIT, prefix, prefix)]
    last = (config.steps or 1) - 1
    for tokens, window, step in ((ENTERED, first, 0), (STAYING, block, 1), (STAYING, block, last)):
        asked = attending(replace(phase, tokens=tokens), config, step)
        size = cached_shape(asked, window, length, rows)
        found.append(None if size is None else replace(size, states={**size.states, CANVAS: length}))
    return found
