"""Fast-dLLM: as many tokens a step as are confident enough, and keys and values kept within a block (NVlabs/Fast-dLLM, v1).

With a cache, the first step of a block forwards the whole canvas and keeps all keys and values. Later steps forward the
block (`dual`), or the block and all that follows it (`prefix`), and see the rest as it stood in the first step: both are
approximations. On LLaDA and on Dream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mosaic.decoding.blocks import Blocks
from mosaic.decoding.canvas import Canvas, Sampling, Shapes, Steps, cached_shape
from mosaic.decoding.llada import candidates, counts
from mosaic.decoding.rows import ALL, RULE, TableRow
from mosaic.models.parts import KEPT, WHOLE, Commit
from mosaic.models.phase import Phase
from mosaic.models.policies.sparse_keys import SparseKeys
from mosaic.models.step import StepSize
from mosaic.registrar.request_table import FROM_BLOCK, OPEN_ONES, PACKED, RANDOM_ONES, REFRESHED
from mosaic.registrar.request_table import WHOLE as WHOLE_SPAN

if TYPE_CHECKING:
    from mosaic.decoding.config import GenerationConfig
    from mosaic.models.architecture import Architecture

__all__ = ["decode", "row", "shapes"]

FACTOR: Final = Commit(score="confidence", rule="factor")
MOST_REFRESHED: Final = 8192
"""Positions of the longest canvas whose Refresh is a table's, beside others' steps; longer ones take heads in turn."""
_WINDOWS: Final[Mapping[Any, int]] = {None: WHOLE_SPAN, "dual": REFRESHED, "prefix": FROM_BLOCK}


def _sampling(config: GenerationConfig, architecture: Architecture) -> Sampling:
    """Dream's confidence is the probability after temperature, top-p and top-k; LLaDA's before."""
    return Sampling.of(config, scaled=architecture.shifted, cuts_greedy=architecture.shifted)


def _phase(config: GenerationConfig, architecture: Architecture, *, first: bool = False) -> Phase:
    """The phase of a step; the first one of a block computes all tokens, and on a shifted model commits one row, whatever its
    confidence."""
    rule: Any = "factor" if config.factor is not None else "top" if config.threshold is None else "threshold"
    return Phase(
        cache=WHOLE if config.cache is None else KEPT,
        head=_sampling(config, architecture).head,
        commit=Commit(score="confidence", rule="top" if first and architecture.shifted and config.cache else rule),
    )


def row(config: GenerationConfig, architecture: Architecture, prompt_len: int, request: int) -> TableRow | None:
    """Return what a table has to know of a request. The generator has sparse keys of long canvases or with `sample` or `drift`,
    and caches on shifted models with steps of several tokens: there a step that follows the schedule commits one."""
    block, least, shifted = config.block_length or 1, config.threshold, architecture.shifted
    sparse, length = config.cache if isinstance(config.cache, SparseKeys) else None, prompt_len + config.gen_length
    if sparse is not None and (length > MOST_REFRESHED or sparse.sided):
        return None
    if shifted and config.cache and config.steps and least is None and counts(config)[0] > 1:
        return None
    at_least = ALL if least is None else float(np.nextafter(np.float32(least), np.float32(-np.inf)))
    return TableRow(
        sampling=_sampling(config, architecture), start=prompt_len, prefix=0, length=length, sparse=sparse,
        block=block, window=PACKED if sparse else _WINDOWS[config.cache],
        steps=len(counts(config)) if config.steps and least is None else block,
        threshold=at_least if config.factor is None else config.factor,
        decides=RANDOM_ONES if config.remasking == "random" else OPEN_ONES, shifted=shifted,
        cache=WHOLE if config.cache is None else KEPT,
        commit=RULE if config.factor is None else FACTOR,
    )  # fmt: skip


def decode(canvas: Canvas) -> Steps:
    """Decode one request, block by block, until no mask is left in the block.

    On shifted models, the row that predicts a block's first position lies before the windows of later steps. So with a
    cache the first step decides that position, unconditionally, and nothing else, as the original does.
    """
    config, block = canvas.config, canvas.config.block_length
    assert block is not None
    sampling, shifted = _sampling(config, canvas.architecture), canvas.architecture.shifted
    whole = _phase(config, canvas.architecture, first=True)
    blocks = Blocks(config, canvas.architecture, canvas.prompt_len, _phase(config, canvas.architecture))
    rule: dict[str, Any] = {"threshold": config.factor if config.factor is not None else config.threshold or 0.0}
    for number in range(config.gen_length // block):
        canvas.block, start = number, canvas.prompt_len + number * block
        end = canvas.length if config.cache in (None, "prefix") else start + block
        window, count = (0, canvas.length), 0
        quotas = iter(counts(config) if config.steps else ())
        while len(positions := canvas.open_rows(start, start + block)):
            first = config.cache is not None and count == 0
            quota = next(quotas, 1)
            positions = positions[:1] if first and shifted else candidates(canvas, positions, quota)
            step = blocks.step(
                start, count, window, key_len=canvas.length, phase=whole if first else None, writes=first
            )
            quota = 1 if first and shifted else quota
            result = yield blocks.ask(canvas, step, positions, sampling=sampling, quota=quota, **rule)
            blocks.take(canvas, step, result)
            if canvas.finished:
                return
            if config.cache:
                window = (start, end)
            count += 1


def shapes(config: GenerationConfig, architecture: Architecture, prompt_len: int, request: int) -> Shapes:
    """Return the whole canvas with a block's rows; on shifted models with one row, then the first window."""
    length, block = prompt_len + config.gen_length, config.block_length or 0
    blocks = Blocks(config, architecture, prompt_len, _phase(config, architecture))
    phase, first = blocks.step(prompt_len, 0, (0, block)).phase, _phase(config, architecture, first=True)
    rows = max(counts(config)) if config.remasking == "random" else block
    if isinstance(config.cache, SparseKeys):
        begin = first if architecture.shifted else None
        return [*config.cache.steps(phase, length, block, answer=config.gen_length, rows=rows, first=begin).values()]
    if not config.cache:
        return [StepSize(phase=phase, windows=(length,), rows=rows)]
    if not architecture.shifted:
        narrow = block if phase.cut is not None else 0
        return [cached_shape(first, length, length, rows), cached_shape(phase, narrow, length, rows)]
    later = min(rows, block - 1)
    window = config.gen_length if config.cache == "prefix" else block
    return [cached_shape(first, length, length, 1), cached_shape(phase, window if later else 0, length, later)]
