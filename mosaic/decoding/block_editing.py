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
from mosaic.decoding.canvas import Canvas, Sampling, Shapes, Steps, whole_blocks
from mosaic.decoding.rows import TableRow
from mosaic.models.parts import KEPT, Commit
from mosaic.models.phase import Phase
from mosaic.registrar.request_table import ALL_ONES

if TYPE_CHECKING:
    from mosaic.decoding.config import GenerationConfig
    from mosaic.models.architecture import Architecture

__all__ = ["decode", "row", "shapes"]

EDIT: Final = Commit(score="confidence", rule="edit")
_AT_LEAST: Final = 1
"""Masks that a step fills when none is confident enough."""


def _phase(config: GenerationConfig) -> Phase:
    return Phase(cache=KEPT, head=Sampling.of(config, scaled=True).head, commit=EDIT)


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
    first, since, saved, quota = start - unwritten, 0, b"", _AT_LEAST
    left = int(canvas.masked[start:end].sum())
    while left or since < config.max_post_steps:
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
        opened, left = left, int(masked.sum())
        since = 0 if left < opened else since + 1
        state = tokens.numpy().tobytes() + masked.numpy().tobytes()
        as_before = state == saved
        decided_as_mask = (tokens == canvas.architecture.mask_token_id) & ~masked
        quota = _AT_LEAST + (int(decided_as_mask.sum()) if as_before else 0)
        if not left or since & (since - 1) == 0:  # what goes round in a circle comes back to one of these states
            saved = state
        if not left and since and as_before:
            return


def row(config: GenerationConfig, architecture: Architecture, prompt_len: int, request: int) -> TableRow:
    """Return what a table has to know of a request."""
    prefix, length = whole_blocks(config, prompt_len)
    block = config.block_length or 1
    return TableRow(
        sampling=Sampling.of(config, scaled=True), start=prefix, prefix=prefix, length=length, block=block, span=block,
        threshold=config.threshold or 0.0, decides=ALL_ONES, commit=EDIT, edit_threshold=config.edit_threshold,
        post_steps=config.max_post_steps,
    )  # fmt: skip


def shapes(config: GenerationConfig, architecture: Architecture, prompt_len: int, request: int) -> Shapes:
    """Return the prefill, and the first step of the last block."""
    return block_shapes(Blocks(config, architecture, prompt_len, _phase(config)))
