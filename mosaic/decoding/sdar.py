"""SDAR block diffusion (JetAstra/SDAR, generate.py): blocks in order, each denoised over the exact keys of those before it.

The prompt's whole blocks are prefilled; its tail is part of the first block that is generated. The original runs one
more pass over a finished block, to write the keys and values of its final tokens. Here the first step of the next block
does that: its window holds both blocks. As attention is causal by blocks, this changes the results of neither.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import chain, repeat
from typing import TYPE_CHECKING

from mosaic.decoding.ahead import ahead_shapes, decode_ahead
from mosaic.decoding.canvas import COMMIT, Canvas, Sampling, Shapes, Steps, cached_shape, whole_blocks
from mosaic.decoding.evicting import Progress, computing
from mosaic.decoding.llada import schedule
from mosaic.decoding.reusing import Refreshes
from mosaic.decoding.selecting import attending, commits_within, committing, later_steps, selection
from mosaic.models.parts import KEPT, Commit
from mosaic.models.parts.windows import APART
from mosaic.models.phase import Phase

if TYPE_CHECKING:
    from mosaic.decoding.config import GenerationConfig
    from mosaic.models.architecture import Architecture

__all__ = ["block_shapes", "decode", "shapes"]


def _sampling(config: GenerationConfig) -> Sampling:
    """`sequential` commits whatever is drawn; a confidence is the probability after temperature, top-p and top-k."""
    return Sampling.of(config, scaled=config.remasking != "sequential")


@lru_cache(maxsize=256)
def _phase(config: GenerationConfig) -> Phase:
    dynamic = config.remasking in (None, "low_confidence_dynamic")  # LLaDA2 has no other
    commit = Commit(score="confidence", rule="dynamic" if dynamic else "top")
    return computing(Phase(cache=KEPT, head=_sampling(config).head, commit=commit), config)


def _committing(config: GenerationConfig) -> Phase:
    """The phase of a step that writes a finished block, or what is left of it."""
    commit = committing(COMMIT, config)
    return replace(commit, tokens=APART) if config.block_commit == "cached" else commit


def decode(canvas: Canvas) -> Steps:
    """Decode one request."""
    config = canvas.config
    block, steps = config.block_length, config.steps
    assert block is not None and steps is not None
    quotas = schedule(block, steps)
    if config.ahead is not False:
        exactly = config.remasking == "low_confidence_static"
        yield from decode_ahead(canvas, _phase(config), _sampling(config), quotas, exactly=exactly)
        return
    prefix, _ = whole_blocks(config, canvas.prompt_len)
    if prefix:
        yield canvas.fill(0, prefix, committing(COMMIT, config))
    progress = Progress(canvas)
    for number, start in enumerate(range(prefix, canvas.length, block)):
        canvas.block = number
        progress.enter(start)
        yield from _denoise_block(canvas, progress, quotas, unwritten=block if number else 0)
        if canvas.finished:
            return


def _denoise_block(canvas: Canvas, progress: Progress, quotas: list[int], *, unwritten: int) -> Steps:
    """Denoise a block until no mask is left in it, or none that matters.

    Parameters
    ----------
    quotas
        What its steps commit; those beyond, where tokens that were dropped are left, as much as the last.
    unwritten
        Tokens before the block whose keys and values are not those of their final tokens yet.
    """
    config, start = canvas.config, progress.start
    phase, sampling, end = _phase(config), _sampling(config), start + (config.block_length or 0)
    first = start - unwritten
    if unwritten and not commits_within(config):
        written = progress.places(first, start) if config.block_commit == "cached" else None
        yield canvas.fill(first, start, _committing(config), places=written, key_len=progress.key_len(written, start))
        first = start
    refreshes, masked = Refreshes(config), canvas.open_array(start, end)
    for step, quota in enumerate(chain(quotas, repeat(quotas[-1]))):
        positions = masked[:quota] if config.remasking == "sequential" else masked
        again, places = refreshes.now(start, end), progress.places(first, end)
        result = yield canvas.ask(
            attending(phase, config, step, refreshes=again), positions, window=(first, end), places=places,
            key_len=progress.key_len(places, end), sampling=sampling, quota=quota, threshold=config.threshold or 0.0,
            values=selection(canvas, start, step, refreshes=again) | progress.values(masked),
        )  # fmt: skip
        refreshes.take(start, end, result, refreshed=again)
        progress.take((first, end), positions, result)
        canvas.take(positions, result)
        first = start
        masked = canvas.open_array(start, end)
        if canvas.finished or not len(masked):
            return


def shapes(config: GenerationConfig, architecture: Architecture, prompt_len: int, request: int) -> Shapes:
    """Return the prefill, and the first step of the last block."""
    if config.ahead is not False:
        return ahead_shapes(config, _phase(config), prompt_len)
    most = None
    if config.remasking == "sequential":
        most = max(schedule(config.block_length or 1, config.steps or 1))
    return block_shapes(config, _phase(config), prompt_len, most)


def block_shapes(config: GenerationConfig, phase: Phase, prompt_len: int, most: int | None = None) -> Shapes:
    """Return the largest steps of block diffusion that decides at most `most` rows per step."""
    block = config.block_length or 0
    prefix, length = whole_blocks(config, prompt_len)
    several = length - prefix > block
    rows = block if several else length - prompt_len
    rows = rows if most is None else min(rows, most)
    within = commits_within(config)
    first = attending(phase, config, 0)
    later = dict.fromkeys(attending(phase, config, step, refreshes=False) for step in later_steps(config))
    return [
        cached_shape(committing(COMMIT, config), prefix, prefix),
        cached_shape(_committing(config), block if several and not within else 0, length - block),
        cached_shape(first, 2 * block if several and within else block, length, rows),
        *(cached_shape(other, block if other != first else 0, length, rows) for other in later),
    ]
