"""The steps of one request in blocks, as its policies make them: largest sizes and requests come from one description.

An algorithm names the block, the window and the positions to decide. Policies change the phase, add values to the request and
note outcomes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from mosaic.decoding.canvas import COMMIT, Canvas, whole_blocks
from mosaic.decoding.config import GenerationConfig
from mosaic.models.parts import KEPT
from mosaic.models.parts.ringed import Ringed
from mosaic.models.phase import Phase
from mosaic.models.policies.policy import BlockStep, with_parts
from mosaic.models.policies.registry import policies_of

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.runtime.steps import StepRequest, StepResult

__all__ = ["Blocks"]

NOTHING: Final = torch.empty(0, dtype=torch.int64)


class Blocks:
    """The blocks of one request, and its policies.

    Parameters
    ----------
    config
        The request's options, resolved.
    phase
        The kind of step that denoises a block, without policies.

    Attributes
    ----------
    prefix, length
        Tokens of the prompt's whole blocks, and positions of the canvas, whole blocks too.
    block, steps
        Tokens of a block, and the steps that it is to take.
    cache
        What keys are kept in: rings for layers with a window, if attention is causal by blocks.
    chunk
        Most tokens of the prompt's whole blocks that one step writes.
    within
        Whether the first step of a block may write the final keys of the block before.
    """

    def __init__(self, config: GenerationConfig, arch: Architecture, prompt_len: int, phase: Phase) -> None:
        self.phase, self.prompt_len = phase, prompt_len
        self.prefix, self.length = whole_blocks(config, prompt_len)
        self.block = config.block_length or 1
        self.steps = config.steps or self.block
        self.cache, self.chunk, window = phase.cache, self.prefix, max(arch.windows, default=0)
        if window and arch.block and self.cache == KEPT:
            # two blocks at least: the first step of one writes both, and may be taken back to the one before
            most = self.block * max(-(-window // self.block), 2)
            self.cache, self.chunk = Ringed(ring=window - 1 + most), min(most, self.prefix)
        self._policies = policies_of(config, arch, self.length)
        self.within = all(policy.within for policy in self._policies)

    def step(
        self, start: int, number: int, window: tuple[int, int], *, key_len: int = 0, phase: Phase | None = None,
        writes: bool = False,
    ) -> BlockStep:  # fmt: skip
        """Describe step `number` of the block at `start`, which forwards a window and sees `key_len` keys (0: to its end).

        `phase` replaces the phase without policies; with `writes` it writes the keys of final tokens.
        """
        step = BlockStep(
            start=start, end=start + self.block, number=number, steps=self.steps, window=window, writes=writes,
            prompt_len=self.prompt_len, prefix=self.prefix, key_len=key_len,
        )  # fmt: skip
        found = phase or self.phase
        if self.cache != self.phase.cache:
            found = with_parts(found, cache=self.cache)
        for policy in self._policies:
            found = policy.phase(found, step)
        step.phase = found
        return step

    def writing(self, start: int, end: int, phase: Phase = COMMIT) -> BlockStep:
        """Describe a step that writes the keys of final tokens: of the prompt, or of a block."""
        return self.step(start, 0, (start, end), phase=phase, writes=True)

    def prefill(self, last: Phase = COMMIT) -> list[BlockStep]:
        """Describe the steps that write the prompt's whole blocks: one, or with rings as many as they have room for."""
        starts = range(0, self.prefix, self.chunk or 1)
        return [
            self.writing(start, min(start + self.chunk, self.prefix), last if start == starts[-1] else COMMIT)
            for start in starts
        ]

    def phases(self) -> list[Phase]:
        """Return the phases of a block's steps in their order, each once."""
        window = (self.prefix, self.prefix + self.block)
        return [*dict.fromkeys(self.step(self.prefix, number, window).phase for number in range(self.steps))]

    def ask(self, canvas: Canvas, step: BlockStep, positions: Tensor = NOTHING, **given: Any) -> StepRequest:
        """Make the request for a step that decides some positions; `given` as for `Canvas.ask`."""
        step.positions = positions.numpy()
        for policy in self._policies:
            policy.tell(step, canvas)
        return canvas.ask(
            step.phase,
            positions,
            window=step.window,
            places=step.places,
            key_len=step.key_len,
            values=step.values,
            **given,
        )

    def take(self, canvas: Canvas, step: BlockStep, result: StepResult) -> None:
        """Take an outcome into the canvas; policies note it unless the step wrote final keys."""
        for policy in () if step.writes else self._policies:
            policy.take(step, canvas, result)
        canvas.take(torch.from_numpy(step.positions), result)
