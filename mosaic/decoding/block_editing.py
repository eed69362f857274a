"""LLaDA2.1: block diffusion whose tokens may still be edited until their block ends (modeling_llada2_moe.py of LLaDA2.1).

A step sees every position of the block but the prompt's. Masks are filled as in LLaDA2.0, which is SDAR's dynamic rule
(`block_diffusion.py`); a token is replaced where another one is more probable than `edit_threshold`. When no mask is left, up to
`max_post_steps` more steps only edit, until one changes nothing. The original has no cache and forwards the whole window
at every step. With attention causal by blocks, keys and values of finished blocks are exact: here a step forwards one block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from mosaic.decoding.block_diffusion import block_shapes
from mosaic.decoding.blocks import Blocks
from mosaic.decoding.canvas import Canvas, Sampling, Shapes, Steps
from mosaic.models.parts import KEPT, Commit
from mosaic.models.phase import Phase

if TYPE_CHECKING:
    from mosaic.decoding.config import GenerationConfig
    from mosaic.models.architecture import Architecture

__all__ = ["decode", "shapes"]

_AT_LEAST: Final = 1
"""Masks that a step fills when none is confident enough."""


def _phase(config: GenerationConfig) -> Phase:
    return Phase(cache=KEPT, head=Sampling.of(config, scaled=True).head, commit=Commit(score="confidence", rule="edit"))


def decode(canvas: Canvas) -> Steps:
    """Decode one request. A block's final keys and values are written by the first step of the next one, as in SDAR."""
    blocks = Blocks(canvas.config, canvas.architecture, canvas.prompt_len, _phase(canvas.config))
    canvas.settled = canvas.prompt_len
    for step in blocks.prefill():
        yield blocks.ask(canvas, step)
    for number, start in enumerate(range(blocks.prefix, canvas.length, blocks.block)):
        canvas.block = number
        yield from _edit_block(canvas, blocks, start, unwritten=blocks.block if number else 0)
        canvas.settled = start + blocks.block
        if canvas.finished:
            return


def _edit_block(canvas: Canvas, blocks: Blocks, start: int, *, unwritten: int) -> Steps:
    """Decode a block, until no mask is left and a step changes nothing, or enough steps have only edited."""
    config, sampling, end = canvas.config, Sampling.of(canvas.config, scaled=True), start + blocks.block
    positions = torch.arange(max(start, canvas.prompt_len), end)
    first, post_steps, seen, quota = start - unwritten, 0, set[bytes](), _AT_LEAST
    while (filling := bool(canvas.masked[start:end].any())) or post_steps < config.max_post_steps:
        before = canvas.tokens[start:end].clone()
        result = yield blocks.ask(
            canvas,
            blocks.step(start, 0, (first, end)),
            positions,
            sampling=sampling,
            quota=quota,
            threshold=config.threshold or 0.0,
            edit_threshold=config.edit_threshold,
        )
        canvas.take(positions, result)
        # what was decided as the mask is a mask to the next step: where such take every place for ever, there are more places
        first, tokens, masked = start, canvas.tokens[start:end], canvas.masked[start:end]
        state = tokens.numpy().tobytes() + masked.numpy().tobytes()
        decided_as_mask = (tokens == canvas.architecture.mask_token_id) & ~masked
        quota = _AT_LEAST + (int(decided_as_mask.sum()) if state in seen else 0)
        seen.add(state)
        if not filling:
            post_steps += 1
            if torch.equal(before, canvas.tokens[start:end]):
                return


def shapes(config: GenerationConfig, architecture: Architecture, prompt_len: int, request: int) -> Shapes:
    """Return the prefill, and the first step of the last block."""
    return block_shapes(Blocks(config, architecture, prompt_len, _phase(config)))
