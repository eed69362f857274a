"""Fast-dLLM v2 (v2/generation_functions.py): block diffusion on a shifted model, each block by small blocks from the left.

Row i-1 predicts position i, so the last row of a finished block predicts the first token of the next one: the pass that
writes a block's keys and values also decides that token, greedily. So no window ever needs the row before it. Where blocks are
decoded greedily, too, that pass is a step like theirs, and shares one with requests that are in a block. With cache
`dual`, once a small block's first token is known, only the small block is forwarded, over the block's keys as they were.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mosaic.decoding.canvas import COMMIT, Canvas, Sampling, Shapes, Steps, cached_shape, whole_blocks
from mosaic.decoding.evicting import Progress, computing
from mosaic.decoding.reusing import Refreshes
from mosaic.decoding.selecting import attending, committing, later_steps, selection
from mosaic.models.parts import KEPT, Commit
from mosaic.models.phase import Phase

if TYPE_CHECKING:
    from mosaic.decoding.config import GenerationConfig
    from mosaic.models.architecture import Architecture

__all__ = ["decode", "shapes"]

_NEXT: Final = Phase(cache=KEPT, commit=Commit(score="confidence", rule="dynamic"))
"""Fill the cache and take the most likely token after the window."""


def _phase(config: GenerationConfig) -> Phase:
    phase = replace(_NEXT, head=Sampling.of(config, scaled=True).head)
    return computing(phase, config, shifted=True)


def _commits_within(config: GenerationConfig) -> bool:
    """Whether a finished block is written, and the next token decided, by a step like those of blocks: where all rows attend to all
    keys."""
    return not config.temperature and config.eviction is None and config.attention is None


def _committing(config: GenerationConfig) -> Phase:
    """The phase of the step that follows a finished block."""
    return _phase(config) if _commits_within(config) else committing(_NEXT, config)


def _fill_and_predict(canvas: Canvas, start: int, end: int, *, prompt: bool = False) -> Steps:
    """Write the keys and values of [start, end), a finished block if it is no `prompt`, and decide position `end`."""
    config, following = canvas.config, torch.tensor([end])
    if prompt or not _commits_within(config):
        request = canvas.ask(committing(_NEXT, config), following, window=(start, end), quota=1)
    else:
        request = canvas.ask(
            _committing(config), following, window=(start, end),
            places=None if config.block_cache is None else np.arange(start, end),
            sampling=Sampling.of(config, scaled=True), quota=1,
        )  # fmt: skip
    result = yield request
    canvas.take(following, result)


def decode(canvas: Canvas) -> Steps:
    """Decode one request; no other request affects which windows it forwards."""
    block = canvas.config.block_length
    assert block is not None
    prefix, _ = whole_blocks(canvas.config, canvas.prompt_len)
    if prefix == canvas.prompt_len:
        yield from _fill_and_predict(canvas, 0, prefix, prompt=True)
    elif prefix:
        yield canvas.fill(0, prefix, committing(COMMIT, canvas.config))
    progress = Progress(canvas)
    for number, start in enumerate(range(prefix, canvas.length, block)):
        canvas.block = number
        if canvas.finished:
            return
        progress.enter(start)
        yield from _denoise_block(canvas, progress, start + block)
        if canvas.finished:
            return
        yield from _fill_and_predict(canvas, start, start + block)


def _denoise_block(canvas: Canvas, progress: Progress, end: int) -> Steps:
    """Denoise the block, small block by small block."""
    config, small, start = canvas.config, canvas.config.small_block_length, progress.start
    assert small is not None
    sampling, cached, step, refreshes = Sampling.of(config, scaled=True), False, 0, Refreshes(config)
    for first in range(start, end, small):
        while len(positions := canvas.open_rows(first, first + small)):
            window = (first, first + small) if cached and not canvas.masked[first] else (start, end)
            again, places = refreshes.now(*window), progress.places(*window)
            result = yield canvas.ask(
                attending(_phase(config), config, step, refreshes=again), positions, window=window,
                places=places, key_len=progress.key_len(places, end), sampling=sampling, quota=1, threshold=config.threshold or 0.0,
                values=selection(canvas, start, step, refreshes=again) | progress.values(),
            )  # fmt: skip
            progress.take(window, positions, result)
            refreshes.take(*window, result, refreshed=again)
            canvas.take(positions, result)
            step += 1
            cached = config.cache == "dual"
            if canvas.finished:
                return


def shapes(config: GenerationConfig, architecture: Architecture, prompt_len: int, request: int) -> Shapes:
    """Return the prefill, a step of the last block, one of the last block that has most rows, and the last commit.

    Blocks and small blocks that hold nothing of the answer, or only a first token, are never denoised.
    """
    block, small = config.block_length or 1, config.small_block_length or 1
    prefix, length = whole_blocks(config, prompt_len)
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
    steps = ((0, None), *((step, False) for step in later_steps(config)))
    phases = dict.fromkeys(attending(_phase(config), config, step, refreshes=again) for step, again in steps)
    return [
        cached_shape(committing(_NEXT if predicts else COMMIT, config), prefix, prefix, int(predicts)),
        *(cached_shape(phase, block if last else 0, last, most_rows.get(last, 0)) for phase in phases),
        *(cached_shape(phase, block if fullest != last else 0, fullest, most_rows.get(fullest, 0)) for phase in phases),
        cached_shape(_committing(config), block if committed > prefix else 0, committed, 1),
    ]
