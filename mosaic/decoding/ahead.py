"""Block diffusion over a canvas on the device: the next step is packed, or launched, before the last one's outcome is known.

The tokens equal those of `block_diffusion.decode`. Steps read their windows from a canvas on the device and write their
decisions to it. So the host knows the next step's inputs beforehand: the block, and how many tokens the schedule commits.
Each step unembeds all rows of its block, as only the device knows which are open.

If a rule takes any number of tokens, the outcome says whether the block is done, and the next step is one of two. Both are
packed meanwhile. The request's earlier steps say which one is likelier, and how doubtful that is. The host launches the likelier
step early if the mean doubt of its requests is at most `DOUBT` (session.py). With `ahead=True` the block goes on if it has more
masks than steps decide on average. A wrong guess costs the request a step that decides nothing; its outcome is not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from mosaic.decoding.canvas import Following, cached_shape
from mosaic.decoding.noise import row_keys
from mosaic.models.parts.windows import CANVAS, ENTERED, OPEN, STAYING
from mosaic.models.policies.policy import with_parts

if TYPE_CHECKING:
    from mosaic.decoding.blocks import Blocks
    from mosaic.decoding.canvas import Canvas, Sampling, Shapes, Steps
    from mosaic.models.phase import Phase
    from mosaic.models.policies.policy import BlockStep
    from mosaic.runtime.steps import StepRequest

__all__ = ["ahead_shapes", "decode_ahead"]

STAYS: Final = OPEN - 1
"""In a window that enters the canvas: a token that stays as it is."""


def decode_ahead(canvas: Canvas, blocks: Blocks, sampling: Sampling, quotas: Sequence[int], *, exactly: bool) -> Steps:
    """Decode one request, whose policies wait for no outcome.

    Parameters
    ----------
    quotas
        Tokens that each step of a block commits: the least number, or with `exactly` the number.
    """
    asked = _Requests(canvas, blocks, sampling, quotas)
    for writing in blocks.prefill():
        yield blocks.ask(canvas, writing)
    masked, steps, taken = canvas.mask_array, 0, 0
    seen = [0] * (blocks.block + 1)  # steps so far, by how many positions they have decided
    for number in range(asked.count):
        canvas.block = number
        positions = asked.positions(number)
        places = positions.numpy()
        for step, quota in enumerate(quotas):
            left = int(np.count_nonzero(masked[places]))
            expected = quota if exactly else max(quota, taken // max(steps, 1))
            sure = exactly or left <= quota or (canvas.config.ahead and left > expected)
            against = sum(seen[left:] if left > expected else seen[:left])
            doubt = 0.0 if sure else (1 + against) / (1 + steps)
            canvas.following = partial(asked.following, number, step, left, expected, doubt)
            result = yield asked.request(number, step)
            # by what stands there: a step before it may have been interrupted on the host, and decided on the device
            committed = masked[places] & (result.chosen.numpy() != OPEN)
            canvas.take(positions, result, torch.from_numpy(committed))
            decided = int(np.count_nonzero(committed))
            steps, taken = steps + 1, taken + decided
            seen[decided] += 1
            if canvas.finished:
                return
            if decided == left:
                break


class _Requests:
    """The requests of one canvas over `count` blocks. Equal requests are one object, which is packed once."""

    def __init__(self, canvas: Canvas, blocks: Blocks, sampling: Sampling, quotas: Sequence[int]) -> None:
        self._canvas, self._blocks, self._sampling, self._quotas = canvas, blocks, sampling, quotas
        self._noisy = blocks.phase.noisy
        self._phases = [_step(blocks, blocks.prefix, number).phase for number in range(len(quotas))]
        self.count = (blocks.length - blocks.prefix) // blocks.block
        self._made: dict[tuple[int, int, Phase, int], StepRequest] = {}

    def positions(self, number: int) -> Tensor:
        """Return the positions of a block outside the prompt, int64."""
        start = self._start(number)
        return torch.arange(max(start, self._canvas.prompt_len), start + self._blocks.block)

    def _start(self, number: int) -> int:
        return self._blocks.prefix + number * self._blocks.block

    def following(self, number: int, step: int, left: int, expected: int, doubt: float) -> Following:
        """Return what may follow a step that finds `left` open positions and is expected to decide `expected` of them.

        `doubt` is the chance of the less likely of two requests; 0 leaves it out.
        """

        def within() -> StepRequest:
            return self.request(number, step + 1, later=1)

        def after() -> StepRequest | None:
            return self.request(number + 1, 0, later=1) if number + 1 < self.count else None

        made = (within, after) if left > expected else (after, within)
        return Following(tuple(make() for make in (made if doubt else made[:1])), doubt)

    def request(self, number: int, step: int, *, later: int = 0) -> StepRequest:
        """Return the request for a step of a block, `later` denoising steps after the next one."""
        phase, now = self._phases[step], self._canvas.step + later
        if step == later == 0:
            self._made = {key: made for key, made in self._made.items() if key[0] == number}
        key = number, self._quotas[step] if step else 0, phase, now if self._noisy else 0
        if key not in self._made:
            self._made[key] = self._make(number, step, now)
        return self._made[key]

    def _make(self, number: int, step: int, now: int) -> StepRequest:
        canvas, blocks, start, positions = self._canvas, self._blocks, self._start(number), self.positions(number)
        asked = _step(blocks, start, step, unwritten=blocks.block if step == 0 and number else 0)
        first, end = asked.window
        made = blocks.ask(
            canvas,
            asked,
            positions,
            sampling=self._sampling,
            quota=self._quotas[step],
            threshold=canvas.config.threshold or 0.0,
        )
        if self._noisy:
            made = replace(made, keys=row_keys(canvas.config.seed, canvas.request, now, positions))
        entered = torch.full((end - first,), STAYS)
        if step == 0:
            entered[start - first :] = canvas.tokens[start:end].masked_fill(canvas.masked[start:end], OPEN)
        return replace(made, values={**made.values, "entered": entered})


def _step(blocks: Blocks, start: int, number: int, *, unwritten: int = 0) -> BlockStep:
    """Describe step `number` of a block; step 0 enters the block's tokens into the canvas."""
    phase = with_parts(blocks.phase, tokens=STAYING if number else ENTERED)
    return blocks.step(start, number, (start - unwritten, start + blocks.block), phase=phase)


def ahead_shapes(blocks: Blocks) -> Shapes:
    """Return the prefill, and the first and later steps of the last block."""
    block, prefix, length = blocks.block, blocks.prefix, blocks.length
    window, rows = (2 * block, block) if length - prefix > block else (block, length - blocks.prompt_len)
    first, *later = [_step(blocks, prefix, number).phase for number in range(max(blocks.steps, 2))]
    return [
        cached_shape(blocks.writing(0, prefix).phase, blocks.chunk, prefix),
        cached_shape(first, window, length, rows, states={CANVAS: length}),
        *(cached_shape(phase, block, length, rows, states={CANVAS: length}) for phase in dict.fromkeys(later)),
    ]
