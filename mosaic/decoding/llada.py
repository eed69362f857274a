"""LLaDA: semi-autoregressive blocks over a whole bidirectional canvas (ML-GSAI/LLaDA, generate.py; facts in docs/decoding.md).

Each block of `block_length` masks is decoded in steps // blocks steps. A step forwards the whole canvas and commits a
scheduled number of the block's masks: the most confident ones, or random ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mosaic.decoding.canvas import Canvas, Sampling, Shapes, Steps
from mosaic.decoding.rows import TableRow
from mosaic.kernels.shared.sampling import uniforms
from mosaic.models.parts import GUIDED, WHOLE, Commit
from mosaic.models.phase import Phase
from mosaic.models.step import StepSize
from mosaic.registrar.request_table import OPEN_ONES, RANDOM_ONES
from mosaic.registrar.request_table import WHOLE as WHOLE_SPAN

if TYPE_CHECKING:
    from mosaic.decoding.config import GenerationConfig
    from mosaic.models.architecture import Architecture

__all__ = ["candidates", "counts", "decode", "phase_of", "row", "schedule", "shapes"]


def schedule(masks: int, steps: int) -> list[int]:
    """Return how many tokens each step commits: evenly, the first steps one more; without steps that are left none.

    >>> schedule(7, 3), schedule(2, 10**9)
    ([3, 2, 2], [1, 1])
    """
    return [masks // steps + (step < masks % steps) for step in range(min(masks, steps))]


def counts(config: GenerationConfig) -> list[int]:
    """Return the schedule of one block."""
    assert config.block_length is not None
    return schedule(config.block_length, _block_steps(config))


def _block_steps(config: GenerationConfig) -> int:
    """The steps of one block, those included that commit nothing."""
    assert config.steps is not None and config.block_length is not None
    return config.steps * config.block_length // config.gen_length


def phase_of(config: GenerationConfig) -> Phase:
    """Return the phase of a LLaDA step."""
    return Phase(
        head=Sampling.of(config, scaled=False).head,
        commit=Commit(score="confidence", rule="top"),
        guidance=GUIDED if config.cfg_scale > 0 else None,
    )


def row(config: GenerationConfig, architecture: Architecture, prompt_len: int, request: int) -> TableRow | None:
    """Return what a table has to know of a request; the generator has guidance, and steps that commit nothing."""
    steps = counts(config)
    if config.cfg_scale > 0 or _block_steps(config) > len(steps):
        return None
    return TableRow(
        sampling=Sampling.of(config, scaled=False), start=prompt_len, prefix=0, length=prompt_len + config.gen_length,
        block=config.block_length or 1, window=WHOLE_SPAN, steps=len(steps),
        decides=RANDOM_ONES if config.remasking == "random" else OPEN_ONES, shifted=architecture.shifted, cache=WHOLE,
    )  # fmt: skip


def candidates(canvas: Canvas, open_: Tensor, quota: int) -> Tensor:
    """Return the positions to unembed: a choice that does not depend on the logits is made before the step."""
    if canvas.config.remasking != "random":
        return open_
    order = torch.argsort(uniforms(canvas.keys(open_)), descending=True, stable=True)
    return open_[order[:quota]].sort().values


def decode(canvas: Canvas) -> Steps:
    """Decode one request; no forward is run for a step that commits nothing (more steps than tokens in a block)."""
    config, block = canvas.config, canvas.config.block_length
    assert block is not None
    phase, sampling = phase_of(config), Sampling.of(config, scaled=False)
    for number in range(config.gen_length // block):
        canvas.block, start = number, canvas.prompt_len + number * block
        canvas.step = number * _block_steps(config)  # those count that commit nothing
        for quota in counts(config):
            positions = candidates(canvas, canvas.open_rows(start, start + block), quota)
            guidance: dict[str, Any] = {}
            if phase.guidance is not None:
                hidden = canvas.tokens.clone()
                hidden[: canvas.prompt_len] = canvas.architecture.mask_token_id
                guidance = {"guidance": config.cfg_scale, "unconditional": hidden}
            result = yield canvas.ask(
                phase, positions, window=(0, canvas.length), sampling=sampling, quota=quota, **guidance
            )
            canvas.take(positions, result)
            if canvas.finished:
                return


def shapes(config: GenerationConfig, architecture: Architecture, prompt_len: int, request: int) -> Shapes:
    """Return the largest step: the first."""
    length = prompt_len + config.gen_length
    rows = max(counts(config)) if config.remasking == "random" else config.block_length or 0
    return [StepSize(phase=phase_of(config), windows=(length,), rows=rows)]
