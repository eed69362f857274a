"""Fast-dLLM v2 (v2/generation_functions.py): block diffusion on a shifted model, each block by small blocks from the left.

Row i-1 predicts position i. So the pass that writes a block's keys and values also decides the first token of the next block,
greedily, and no window needs the row before it. If blocks are decoded greedily, too, that pass shares steps with requests
inside a block. With cache `dual`, once a small block's first token is known, only the small block is forwarded, over the
block's keys as they were.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from mosaic.decoding.blocks import Blocks
from mosaic.decoding.canvas import COMMIT, Canvas, Sampling, Shapes, Steps, cached_shape, whole_blocks
from mosaic.decoding.rows import TableRow
from mosaic.models.parts import KEPT, Commit
from mosaic.models.phase import Phase
from mosaic.registrar.request_table import REFRESHED, WHOLE

if TYPE_CHECKING:
    from mosaic.decoding.config import GenerationConfig
    from mosaic.models.architecture import Architecture
    from mosaic.models.policies.policy import BlockStep

__all__ = ["decode", "row", "shapes"]

_NEXT: Final = Phase(cache=KEPT, commit=Commit(score="confidence", rule="dynamic"))
"""Fill the cache and take the most likely token after the window."""


def _blocks(config: GenerationConfig, arch: Architecture, prompt_len: int) -> Blocks:
    return Blocks(config, arch, prompt_len, replace(_NEXT, head=Sampling.of(config, scaled=True).head))


def row(config: GenerationConfig, architecture: Architecture, prompt_len: int, request: int) -> TableRow:
    """Return what a table has to know of a request. A prompt of whole blocks leaves its last one to a step that also predicts."""
    prefix, length = whole_blocks(config, prompt_len)
    block, small = config.block_length or 1, config.small_block_length or 1
    before = block if prefix == prompt_len else 0
    return TableRow(
        sampling=Sampling.of(config, scaled=True), start=prompt_len // small * small, prefix=prefix - before, length=length,
        block=small, span=block, window=REFRESHED if config.cache == "dual" else WHOLE, before=before,
        threshold=config.threshold or 0.0, shifted=True,
    )  # fmt: skip


def _closing(blocks: Blocks, config: GenerationConfig, start: int, end: int) -> BlockStep:
    """Describe the step after a finished block: a first step of the next block if steps are greedy and attend to all keys."""
    alike = not config.temperature and all(
        found.cache == blocks.cache and found.cut is None for found in blocks.phases()
    )
    return blocks.step(end, 0, (start, end), key_len=end) if alike else blocks.writing(start, end, _NEXT)


def _predict(canvas: Canvas, blocks: Blocks, step: BlockStep) -> Steps:
    """Write the keys and values of a window, and decide the position behind it."""
    following = torch.tensor([step.window[1]])
    given = {} if step.writes else {"sampling": Sampling.of(canvas.config, scaled=True)}
    result = yield blocks.ask(canvas, step, following, quota=1, **given)
    canvas.take(following, result)


def decode(canvas: Canvas) -> Steps:
    """Decode one request."""
    config = canvas.config
    blocks = _blocks(config, canvas.architecture, canvas.prompt_len)
    block, prefix = blocks.block, blocks.prefix
    for step in blocks.prefill(_NEXT if prefix == canvas.prompt_len else COMMIT):
        if step.window[1] == canvas.prompt_len:
            yield from _predict(canvas, blocks, step)
        else:
            yield blocks.ask(canvas, step)
    for number, start in enumerate(range(prefix, canvas.length, block)):
        canvas.block = number
        if canvas.finished:
            return
        yield from _denoise_block(canvas, blocks, start)
        if canvas.finished:
            return
        yield from _predict(canvas, blocks, _closing(blocks, config, start, start + block))


def _denoise_block(canvas: Canvas, blocks: Blocks, start: int) -> Steps:
    """Denoise the block, small block by small block."""
    config, small, end = canvas.config, canvas.config.small_block_length, start + blocks.block
    assert small is not None
    sampling, cached, number = Sampling.of(config, scaled=True), False, 0
    for first in range(start, end, small):
        while len(positions := canvas.open_rows(first, first + small)):
            window = (first, first + small) if cached and not canvas.masked[first] else (start, end)
            step = blocks.step(start, number, window, key_len=end)
            result = yield blocks.ask(
                canvas, step, positions, sampling=sampling, quota=1, threshold=config.threshold or 0.0
            )
            blocks.take(canvas, step, result)
            number += 1
            cached = config.cache == "dual"
            if canvas.finished:
                return


def shapes(config: GenerationConfig, architecture: Architecture, prompt_len: int, request: int) -> Shapes:
    """Return the prefill, a step of the last block, one of the last block that has most rows, and the last commit.

    Blocks and small blocks that hold nothing of the answer, or only a first token, are never denoised.
    """
    blocks, small = _blocks(config, architecture, prompt_len), config.small_block_length or 1
    block, prefix, length = blocks.block, blocks.prefix, blocks.length
    predicts, end = prefix == prompt_len, prompt_len + config.gen_length
    most_rows: dict[int, int] = {}
    for start in range(prefix, length, block):
        known = start + 1 if predicts or start > prefix else prompt_len
        parts = [range(max(first, known), first + small) for first in range(start, start + block, small)]
        most_rows[start + block] = max((len(part) for part in parts if len(part) and part[0] < end), default=0)
    denoised = [key_len for key_len, rows in most_rows.items() if rows]
    last = denoised[-1] if denoised else 0
    fullest = max(denoised, key=lambda key_len: (most_rows[key_len], key_len), default=0)
    committed = (end - 1 - prefix) // block * block + prefix
    phases, closing = blocks.phases(), _closing(blocks, config, committed - block, committed).phase
    return [
        cached_shape(
            blocks.writing(0, prefix, _NEXT if predicts else COMMIT).phase, blocks.chunk, prefix, int(predicts)
        ),
        *(cached_shape(phase, block if last else 0, last, most_rows.get(last, 0)) for phase in phases),
        *(cached_shape(phase, block if fullest != last else 0, fullest, most_rows.get(fullest, 0)) for phase in phases),
        cached_shape(closing, block if committed > prefix else 0, committed, 1),
    ]
