"""Block diffusion of SDAR (JetAstra/SDAR, generate.py) and LLaDA2.0: blocks in order, each over the exact keys of earlier blocks.

The prompt's whole blocks are prefilled; its tail is part of the first block that is generated. The original runs one
more pass over a finished block, to write the keys and values of its final tokens. Here the first step of the next block
does that: its window holds both blocks. As attention is causal by blocks, this changes the results of neither.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain, repeat
from typing import TYPE_CHECKING

from mosaic.decoding.blocks import Blocks
from mosaic.decoding.canvas import Canvas, Sampling, Shapes, Steps, cached_shape, whole_blocks
from mosaic.decoding.llada import schedule
from mosaic.decoding.rows import ALL, TableRow
from mosaic.models.parts import KEPT, Commit
from mosaic.models.phase import Phase
from mosaic.registrar.request_table import FIRST_ONES, OPEN_ONES

if TYPE_CHECKING:
    from mosaic.decoding.config import GenerationConfig
    from mosaic.models.architecture import Architecture

__all__ = ["block_shapes", "decode", "row", "shapes"]


@lru_cache(maxsize=256)
def _sampling(config: GenerationConfig) -> Sampling:
    """`sequential` commits whatever is drawn; a confidence is the probability after temperature, top-p and top-k."""
    return Sampling.of(config, scaled=config.remasking != "sequential")


@lru_cache(maxsize=256)
def _phase(config: GenerationConfig) -> Phase:
    dynamic = config.remasking in (None, "low_confidence_dynamic")  # LLaDA2.0 has no other
    return Phase(
        cache=KEPT, head=_sampling(config).head, commit=Commit(score="confidence", rule="dynamic" if dynamic else "top")
    )


def row(config: GenerationConfig, architecture: Architecture, prompt_len: int, request: int) -> TableRow:
    """Return what a table has to know of a request."""
    prefix, length = whole_blocks(config, prompt_len)
    dynamic = config.remasking in (None, "low_confidence_dynamic")
    return TableRow(
        sampling=_sampling(config), start=prefix, prefix=prefix, length=length, block=config.block_length or 1,
        span=config.block_length or 1, steps=config.steps or 1, threshold=(config.threshold or 0.0) if dynamic else ALL,
        decides=FIRST_ONES if config.remasking == "sequential" else OPEN_ONES,
    )  # fmt: skip


def decode(canvas: Canvas) -> Steps:
    """Decode one request."""
    config = canvas.config
    quotas = schedule(config.block_length or 1, config.steps or 1)
    blocks = Blocks(config, canvas.architecture, canvas.prompt_len, _phase(config))
    for step in blocks.prefill():
        yield blocks.ask(canvas, step)
    for number, start in enumerate(range(blocks.prefix, canvas.length, blocks.block)):
        canvas.block = number
        yield from _denoise_block(canvas, blocks, start, quotas, unwritten=blocks.block if number else 0)
        if canvas.finished:
            return


def _denoise_block(canvas: Canvas, blocks: Blocks, start: int, quotas: list[int], *, unwritten: int) -> Steps:
    """Denoise a block until it has no mask or the answer is complete.

    Parameters
    ----------
    quotas
        Tokens that each step commits; further steps, for tokens that were dropped, commit as many as the last.
    unwritten
        Tokens before the block whose final keys and values are not written yet.
    """
    config, sampling, end = canvas.config, _sampling(canvas.config), start + blocks.block
    first = start - unwritten
    if unwritten and not blocks.within:
        yield blocks.ask(canvas, blocks.writing(first, start))
        first = start
    masked = canvas.open_rows(start, end)
    for number, quota in enumerate(chain(quotas, repeat(quotas[-1]))):
        positions = masked[:quota] if config.remasking == "sequential" else masked
        step = blocks.step(start, number, (first, end))
        result = yield blocks.ask(
            canvas, step, positions, sampling=sampling, quota=quota, threshold=config.threshold or 0.0
        )
        blocks.take(canvas, step, result)
        first = start
        masked = canvas.open_rows(start, end)
        if canvas.finished or not len(masked):
            return


def shapes(config: GenerationConfig, architecture: Architecture, prompt_len: int, request: int) -> Shapes:
    """Return the prefill, and the first step of the last block."""
    blocks = Blocks(config, architecture, prompt_len, _phase(config))
    most = None
    if config.remasking == "sequential":
        most = max(schedule(config.block_length or 1, config.steps or 1))
    return block_shapes(blocks, most)


def block_shapes(blocks: Blocks, most: int | None = None) -> Shapes:
    """Return the largest steps of block diffusion that decides at most `most` rows per step."""
    block, prefix, length = blocks.block, blocks.prefix, blocks.length
    several = length - prefix > block
    rows = block if several else length - blocks.prompt_len
    rows = rows if most is None else min(rows, most)
    first, *later = blocks.phases()
    written = blocks.writing(length - 2 * block, length - block).phase
    return [
        cached_shape(blocks.writing(0, prefix).phase, blocks.chunk, prefix),
        cached_shape(written, block if several and not blocks.within else 0, length - block),
        cached_shape(first, 2 * block if several and blocks.within else block, length, rows),
        *(cached_shape(phase, block, length, rows) for phase in later),
    ]
