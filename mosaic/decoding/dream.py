"""Dream's diffusion_generate: no blocks, every mask of the canvas a candidate at every step (Dream, generation_utils.py).

Times t_i run from 1 to eps. `origin` decides each mask with probability 1 - s/t; the others take the int(masks * (1 -
s/t)) rows of the highest confidence (maskgit_plus), margin or negative entropy, or draw them at `alg_temp`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from mosaic.decoding.canvas import Canvas, Sampling, Shapes, Steps
from mosaic.decoding.noise import row_keys
from mosaic.decoding.rows import TableRow
from mosaic.kernels.shared.sampling import uniforms
from mosaic.models.parts import WHOLE, Commit
from mosaic.models.phase import Phase
from mosaic.models.step import StepSize
from mosaic.registrar.request_table import LEAST_ONES, OPEN_ONES
from mosaic.registrar.request_table import WHOLE as WHOLE_SPAN

if TYPE_CHECKING:
    from mosaic.decoding.config import GenerationConfig
    from mosaic.models.architecture import Architecture

__all__ = ["decode", "row", "shapes"]

_SCORES: Final = {"origin": "confidence", "maskgit_plus": "confidence", "topk_margin": "margin", "entropy": "entropy"}


def _sampling(config: GenerationConfig) -> Sampling:
    """What `origin` decides does not depend on confidence, so that plain heads do."""
    chosen = config.alg != "origin"
    return Sampling.of(config, scaled=chosen, cuts_greedy=chosen)


def _phase(config: GenerationConfig) -> Phase:
    score: Any = _SCORES[config.alg or "origin"]
    perturb = config.alg != "origin" and bool(config.alg_temp)
    return Phase(head=_sampling(config).head, commit=Commit(score=score, rule="top", perturb=perturb))


def row(config: GenerationConfig, architecture: Architecture, prompt_len: int, request: int) -> TableRow:
    """Return what a table has to know of a request: which steps decide how many is known before the first."""
    commit, origin = _phase(config).commit, config.alg == "origin"
    assert isinstance(commit, Commit)
    schedule = _quotas(config)
    if origin:
        schedule = tuple([(step, len(drawn)) for step, drawn in _origin(config, request, prompt_len)])
    return TableRow(
        sampling=_sampling(config), start=prompt_len, prefix=0, length=prompt_len + config.gen_length,
        block=config.gen_length, window=WHOLE_SPAN, decides=LEAST_ONES if origin else OPEN_ONES,
        shifted=architecture.shifted, cache=WHOLE, commit=replace(commit, rule="dynamic"), schedule=schedule,
        score_temperature=0.0 if origin else config.alg_temp or 0.0,
    )  # fmt: skip


def _shares(config: GenerationConfig) -> Tensor:
    """1 - s/t of every step but the last, in float32 as published; the last decides all that is left."""
    assert config.steps is not None
    times = torch.linspace(1, config.eps, config.steps + 1)
    return (1 - times[1:] / times[:-1])[:-1]


def _origin(config: GenerationConfig, request: int, prompt_len: int) -> Iterator[tuple[int, Tensor]]:
    """Which positions are decided at which step: not a matter of logits, so steps that decide none are never run."""
    left = torch.arange(prompt_len, prompt_len + config.gen_length)
    for step, share in enumerate(_shares(config)):
        if not len(left):
            return
        drawn = uniforms(row_keys(config.seed, request, step, left)) < share
        if drawn.any():
            yield step, left[drawn]
        left = left[~drawn]
    if len(left):
        yield (config.steps or 1) - 1, left


@lru_cache(maxsize=64)
def _quotas(config: GenerationConfig) -> tuple[tuple[int, int], ...]:
    """Each step that decides any of the masks, and how many, in float32."""
    left, found = config.gen_length, list[tuple[int, int]]()
    for step, share in enumerate(_shares(config).numpy()):
        if quota := int(np.float32(left) * share):
            found.append((step, quota))
            left -= quota
    return (*found, *([((config.steps or 1) - 1, left)] if left else ()))


def decode(canvas: Canvas) -> Steps:
    """Decode one request."""
    config = canvas.config
    phase, sampling = _phase(config), _sampling(config)
    steps: Iterable[tuple[int, Tensor, int]]
    steps = ((step, canvas.open_rows(0, canvas.length), quota) for step, quota in _quotas(config))
    if config.alg == "origin":
        drawn = _origin(config, canvas.request, canvas.prompt_len)
        steps = ((step, positions, len(positions)) for step, positions in drawn)
    noise = 0.0 if config.alg == "origin" else config.alg_temp or 0.0
    for step, positions, quota in steps:
        canvas.step = step
        result = yield canvas.ask(
            phase, positions, window=(0, canvas.length), sampling=sampling, quota=quota, score_temperature=noise
        )
        canvas.take(positions, result)
        if canvas.finished:
            return


def shapes(config: GenerationConfig, architecture: Architecture, prompt_len: int, request: int) -> Shapes:
    """Return the canvas with all its masks; of `origin`, with the most that one step decides."""
    rows = config.gen_length
    if config.alg == "origin":
        rows = max(len(positions) for _, positions in _origin(config, request, prompt_len))
    return [StepSize(phase=_phase(config), windows=(prompt_len + config.gen_length,), rows=rows)]
