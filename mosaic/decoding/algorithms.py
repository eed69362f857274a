"""The decoding algorithms by name: how to decode one request, and its largest steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mosaic.decoding import dream, fast_dllm, fast_dllm_v2, llada, llada2, sdar
from mosaic.decoding.canvas import Canvas, Shapes, Steps, whole_blocks
from mosaic.decoding.config import GenerationConfig, resolve
from mosaic.models.architecture import Architecture
from mosaic.models.phase import Phase
from mosaic.models.step import StepSize

__all__ = ["Algorithm", "algorithm_of", "canvas_length", "shapes"]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An algorithm: a generator over a canvas, and the largest steps that it will ask for."""

    decode: Callable[[Canvas], Steps]
    shapes: Callable[[GenerationConfig, Architecture, int, int], Shapes]


_ALGORITHMS: Final[Mapping[str, Algorithm]] = {
    "llada": Algorithm(llada.decode, llada.shapes),
    "dream": Algorithm(dream.decode, dream.shapes),
    "fast-dllm": Algorithm(fast_dllm.decode, fast_dllm.shapes),
    "sdar": Algorithm(sdar.decode, sdar.shapes),
    "fast-dllm-v2": Algorithm(fast_dllm_v2.decode, fast_dllm_v2.shapes),
    "llada2": Algorithm(sdar.decode, sdar.shapes),
    "llada2.1": Algorithm(llada2.decode, llada2.shapes),
}


def algorithm_of(config: GenerationConfig) -> Algorithm:
    """The algorithm of a resolved config. LLaDA's schedule with a cache is Fast-dLLM without a threshold."""
    return _ALGORITHMS["fast-dllm" if config.cache and config.algorithm == "llada" else config.algorithm or "llada"]


def canvas_length(config: GenerationConfig, architecture: Architecture, prompt_len: int) -> int:
    """Positions of a request's canvas: whole blocks where the model attends by blocks."""
    return whole_blocks(config, prompt_len)[1] if architecture.block else prompt_len + config.gen_length


def shapes(
    config: GenerationConfig,
    prompt_lens: Sequence[int],
    architecture: Architecture,
    request_ids: Sequence[int] | None = None,
) -> list[StepSize]:
    """Give the largest steps of a whole generation: none of its steps takes more memory than one of these.

    One request that nothing ends early reaches every one of them; several may meet their largest at different times.

    Examples
    --------
    >>> from mosaic.models import load
    >>> config = GenerationConfig(gen_length=64, block_length=32)
    >>> [(size.windows, size.rows) for size in shapes(config, [100, 7], load("llada-8b").architecture)]
    [((164, 71), 64)]
    """
    found = resolve(config, architecture)
    asked = range(len(prompt_lens)) if request_ids is None else request_ids
    each = [
        (canvas_length(found, architecture, length), algorithm_of(found).shapes(found, architecture, length, request))
        for length, request in zip(prompt_lens, asked, strict=True)
    ]
    packed: dict[tuple[int, Phase], list[tuple[int, StepSize]]] = {}
    for canvas, own in each:
        for place, size in enumerate(own):
            if size is not None:
                packed.setdefault((place, size.phase), []).append((canvas, size))
    return [
        StepSize(
            phase=phase,
            windows=tuple(size.tokens for _, size in group),
            keys=tuple(seen for _, size in group for seen in size.keys),
            rows=sum(size.rows for _, size in group),
            owned=tuple(canvas for canvas, _ in group) if phase.cached else (),
        )
        for (_, phase), group in packed.items()
    ]
