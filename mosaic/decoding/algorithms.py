"""The decoding algorithms by name: how to decode one request, and its largest steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import ModuleType
from typing import Final

from mosaic.decoding import dream, fast_dllm, fast_dllm_v2, llada, llada2, sdar
from mosaic.decoding.algorithm import Algorithm
from mosaic.decoding.config import ALGORITHMS, GenerationConfig, resolve
from mosaic.models.architecture import Architecture
from mosaic.models.phase import Phase
from mosaic.models.state import State
from mosaic.models.step import StepSize, most_rows

__all__ = ["algorithm_of", "canvas_length", "largest_steps", "shapes", "shared_sizes"]


_MODULES: Final[Mapping[str, ModuleType]] = {
    "llada": llada, "dream": dream, "fast-dllm": fast_dllm, "sdar": sdar, "fast-dllm-v2": fast_dllm_v2, "llada2": sdar,
    "llada2.1": llada2,
}  # fmt: skip
_ALGORITHMS: Final[Mapping[str, Algorithm]] = {
    name: Algorithm(name=name, decode=module.decode, shapes=module.shapes, traits=ALGORITHMS[name])
    for name, module in _MODULES.items()
}


def algorithm_of(config: GenerationConfig) -> Algorithm:
    """Return the algorithm of a resolved config. LLaDA's schedule with a cache is Fast-dLLM without a threshold."""
    if isinstance(config.algorithm, Algorithm):
        return config.algorithm
    return _ALGORITHMS["fast-dllm" if config.cache and config.algorithm == "llada" else config.algorithm or "llada"]


def canvas_length(config: GenerationConfig, architecture: Architecture, prompt_len: int) -> int:
    """Return the positions of a request's canvas: whole blocks where the model attends by blocks."""
    block = architecture.block or 1
    return -(-(prompt_len + config.gen_length) // block) * block


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
    return shared_sizes(
        [largest_steps(found, architecture, length, number) for length, number in zip(prompt_lens, asked, strict=True)]
    )


def largest_steps(
    config: GenerationConfig, architecture: Architecture, prompt_len: int, request_id: int
) -> list[StepSize]:
    """Return the largest steps of one request, options resolved: none of its steps is larger than all of these.

    Its rows of states are those that it takes: of keys and values, for the whole canvas.
    """
    canvas = canvas_length(config, architecture, prompt_len)
    sizes = algorithm_of(config).shapes(config, architecture, prompt_len, request_id)
    return [_of_canvas(size, canvas) for size in sizes if size is not None]


def _of_canvas(size: StepSize, length: int) -> StepSize:
    """The same step of a sequence that has rows for its whole canvas."""
    cache = size.phase.cache
    return (
        size if cache.kept is None else replace(size, owned=(length,), states={**size.states, **cache.rows((length,))})
    )


def shared_sizes(requests: Sequence[Sequence[StepSize]]) -> list[StepSize]:
    """Return the largest steps that requests may come to share, whatever each of them is at when they meet.

    Of several requests, one whose largest steps of a phase differ counts with the most of each: window, keys and rows.

    Parameters
    ----------
    requests
        The largest steps of each.
    """
    if len(requests) == 1:
        return list(requests[0])
    packed: dict[Phase, list[StepSize]] = {}
    for largest in requests:
        for size in _most_by_phase(tuple(largest)):
            packed.setdefault(size.phase, []).append(size)
    return [
        StepSize(
            phase=phase,
            windows=tuple([size.windows[0] for size in group]),
            keys=tuple([seen for size in group for seen in size.keys]),
            owned=tuple([owned for size in group for owned in size.owned]),
            rows=sum([size.rows for size in group]),
            states=_sums(size.states for size in group),
        )
        for phase, group in packed.items()
    ]


def _sums(states: Iterable[Mapping[State, int]]) -> dict[State, int]:
    found: dict[State, int] = {}
    for rows in states:
        for state, count in rows.items():
            found[state] = found.get(state, 0) + count
    return found


@lru_cache(maxsize=1024)
def _most_by_phase(largest: tuple[StepSize, ...]) -> tuple[StepSize, ...]:
    """Of each phase one size that is at least as large as each of a request's."""
    phases = dict.fromkeys(size.phase for size in largest)
    return tuple(_most([size for size in largest if size.phase == phase]) for phase in phases)


def _most(sizes: Sequence[StepSize]) -> StepSize:
    """One request's size that is at least as large as each of these, of one phase."""
    keys = [seen for size in sizes for seen in size.keys]
    return replace(
        sizes[0], windows=(max(size.windows[0] for size in sizes),), keys=(max(keys),) if keys else (),
        rows=max(size.rows for size in sizes), states=most_rows(sizes),
    )  # fmt: skip
