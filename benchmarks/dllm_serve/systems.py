"""The systems by name, each under one budget of device memory: loops in PyTorch over one model's weights, and Mosaic's sessions.

The loops' PyTorch may take what the budget leaves beside the context. A static batch has as many requests as fit when all are of
the longest, and dLLM-Serve's pool the rows of as many.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

import mosaic
from benchmarks.bench.baselines import Transformer
from benchmarks.bench.meters import driver_bytes
from benchmarks.bench.torch_engine import fill
from benchmarks.dllm_serve import padded
from benchmarks.dllm_serve.baselines import (
    Found,
    Queue,
    Scheduled,
    Static,
    System,
    packed_loop,
    padded_loop,
    pages_of,
    rows_of,
)
from benchmarks.dllm_serve.dllm_cache import dllm_cache, dllm_cache_packed
from benchmarks.dllm_serve.phases import PackedSteps, Pool
from benchmarks.dllm_serve.trace import BLOCK, LONGEST, SHORTEST, Asked
from benchmarks.served import Meter
from mosaic.decoding import GenerationConfig, LiveRequest, Session, Submission
from mosaic.errors import DoesNotFit, UsageError
from mosaic.models import Model
from mosaic.runtime.compiled import CompiledModel
from mosaic.units import GIB, format_bytes

__all__ = ["BASELINES", "DEFAULT", "MOSAIC", "Loops", "Made", "MosaicSystem", "beside_bytes", "mosaic_system"]

MOSAIC: Final = "mosaic:"
"""Begins the name of a Mosaic system; a cache as `GenerationConfig` takes it follows."""
CPU_UNITS: Final = 4
"""Requests of a batch where there is no budget to fill."""
PLACES: Final = 1024
LARGE: Final = 32 * GIB
SMALL_TOKENS: Final = 4000
"""dLLM-Serve's "max batched tokens", on its card of 24 GB (table 3)."""
LARGE_TOKENS: Final = 16384
"""The same on that of 48 GB, which a budget from `LARGE` on is taken for."""
MARGIN: Final = 0.97
"""Share of the memory in which a batch has to fit to be taken: the rest is for fragments."""


@dataclass(slots=True)
class Made:
    """A system, and what it was made with: requests of a batch, or of the longest requests that a pool has rows for."""

    system: System
    units: int | None = None


def _static_padded(loop: Any, network: Transformer, units: int, tokens: int, longest: Asked = LONGEST) -> System:
    return Static(padded_loop(network, loop), units)


def _static_packed(dual: bool, network: Transformer, units: int, tokens: int, longest: Asked = LONGEST) -> System:
    pool = Pool.of(network, units * rows_of(longest, dual=dual))
    return Static(packed_loop(PackedSteps(network, pool, units, longest.length), dual=dual), units)


def _cache_packed(network: Transformer, units: int, tokens: int, longest: Asked = LONGEST) -> System:
    return Static(lambda found: dllm_cache_packed(network, found), units)


def _scheduled(published: bool, network: Transformer, units: int, tokens: int, longest: Asked = LONGEST) -> System:
    rows = pages_of(longest) if published else rows_of(longest, dual=False)
    pool = Pool.of(network, units * rows)
    return Scheduled(PackedSteps(network, pool, PLACES, longest.length, published=published), tokens)


BASELINES: Final[Mapping[str, Callable[..., System]]] = {
    "fast-dllm": partial(_static_padded, padded.fast_dllm), "fast-dllm-packed": partial(_static_packed, True),
    "dllm-cache": partial(_static_padded, dllm_cache), "dllm-cache-packed": _cache_packed,
    "sparse-dllm": partial(_static_padded, padded.sparse_dllm), "sparse-dllm-packed": partial(_static_packed, False),
    "dllm-serve": partial(_scheduled, True), "dllm-serve-packed": partial(_scheduled, False),
}  # fmt: skip
"""From a model, units as in `Made`, tokens of a step of dLLM-Serve's scheduler, and the longest request."""
DEFAULT: Final = (
    *BASELINES, f"{MOSAIC}dual", f"{MOSAIC}sparse:retention=0.5",
    f"{MOSAIC}sparse:retention=0.5:selection=uniform-published:delay=1",
)  # fmt: skip


# --- loops ----------------------------------------------------------------------------------------------------------------


class Loops:
    """Makes loops of a model by name, within a budget where there is one.

    Raises
    ------
    UsageError
        If the model is none of LLaDA's kind.
    """

    def __init__(self, model: Model, *, cuda: bool, budget_bytes: int | None, seed: int) -> None:
        arch = model.architecture
        if arch.block or arch.shifted or arch.windows:
            raise UsageError(
                f"{model.name}: the loops are for models that attend in both directions and predict a position in its own row, "
                "like LLaDA."
            )
        self._model, self._budget, self._seed, self._cuda = model, budget_bytes, seed, cuda
        self._network: Transformer | None = None
        if cuda:  # fragments would take what a batch needs
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")

    @property
    def network(self) -> Transformer:
        """The model, made when it is wanted first."""
        if self._network is None:
            arch, device = self._model.architecture, "cuda" if self._cuda else "cpu"
            self._network = Transformer(arch, device=device, wide_rotary=self._model.family == "llada")
            fill(self._network.tensors, self._model, self._seed)
        return self._network

    def make(self, name: str) -> Made:
        """Make one, as large as the budget allows.

        Raises
        ------
        DoesNotFit
            If not even one request fits.
        """
        large = self._budget is not None and self._budget >= LARGE
        build = partial(BASELINES[name], self.network, tokens=LARGE_TOKENS if large else SMALL_TOKENS)
        if self._budget is None:
            return Made(build(units=CPU_UNITS), CPU_UNITS)
        _limit(MARGIN * (self._budget - beside_bytes()))
        units = _most_units(build, name, self._budget)
        _collect()
        _limit(self._budget - beside_bytes())
        return Made(build(units=units), units)

    def close(self) -> None:
        """Give the weights back, and let PyTorch have all of the card."""
        self._network = None
        _collect()
        if self._budget is not None:
            torch.cuda.set_per_process_memory_fraction(1.0)


def _limit(num_bytes: float) -> None:
    """Let PyTorch have so many bytes of the card."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(num_bytes / total, 1.0))


def beside_bytes() -> int:
    """Return the bytes of the card that are not PyTorch's: context, modules and libraries."""
    return (driver_bytes(True) or 0) - torch.cuda.memory_reserved()


def _most_units(build: Callable[..., System], name: str, budget_bytes: int | None) -> int:
    """Find the most units with which the first steps of the longest requests fit, and a scheduler's steps in mixed traffic."""
    low, high = 0, 1
    while _fits(build, high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(build, middle) else (low, middle)
    while low and not _fits(build, low, mixed=True):
        low -= max(low // 16, 1)
    if not low:
        raise DoesNotFit(
            f"{name}: a request of {LONGEST.length:,} positions does not fit {format_bytes(budget_bytes or 0)}."
        )
    return low


def _fits(build: Callable[..., System], units: int, *, mixed: bool = False) -> bool:
    """Whether each kind of step fits, of the longest requests; or of a scheduler with these and the shortest in turn, in all
    phases, of which many begin at once and are padded to the longest."""
    _collect()  # what the last one held, even where it has failed
    try:
        system = build(units=units)
        if mixed and not isinstance(system, Scheduled):
            return True
        for number in range(4 * units if mixed else units):
            asked = SHORTEST if mixed and number % 2 else LONGEST
            system.submit(asked._replace(number=number), torch.zeros(asked.prompt, dtype=torch.int64))
        while system.waiting and not mixed:
            system.step()
        for _ in range(BLOCK + 3 if mixed else 3):
            system.step()
        torch.cuda.synchronize()
        return True
    except torch.OutOfMemoryError:
        return False


def _collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- Mosaic ---------------------------------------------------------------------------------------------------------------


class MosaicSystem(Queue):
    """A session that admits requests in the order in which they come."""

    asynchronous = False

    def __init__(self, model: CompiledModel, cache: str) -> None:
        super().__init__()
        self.meter = Meter(model)
        self._session, self._cache = Session(self.meter), cache
        self._lives = dict[LiveRequest, Asked]()
        self._ended = 0
        with suppress(UsageError):  # requests that generators decode have no ladder of steps
            self._session.warm(self._config(BLOCK), tokens=LONGEST.length)

    def _config(self, answer: int) -> GenerationConfig:
        return GenerationConfig(
            gen_length=answer, steps=answer, block_length=BLOCK, cache=self._cache, stop_at_eos=False
        )

    @property
    def decided(self) -> int:
        """Tokens that have been decided; each step of a request decides one."""
        return self._ended + sum(live.steps for live in self._lives)

    @decided.setter
    def decided(self, count: int) -> None:
        self._ended = count

    @property
    def is_busy(self) -> bool:
        """Whether requests wait or run."""
        return bool(self.waiting or self._lives)

    def reset(self) -> None:
        """Forget all requests."""
        self.waiting.clear()
        for live in self._session.live:
            self._session.cancel(live)
        self._lives = {}

    def step(self) -> Found:
        """Admit who fits, and run a step."""
        while self.waiting:
            asked, prompt = self.waiting[0]
            submission = Submission(prompt=prompt, config=self._config(asked.answer), request_id=asked.number)
            if not self._session.admits(submission):
                break
            (live,) = self._session.submit_all([submission])
            self._lives[live] = asked
            self.waiting.popleft()
        assert self._lives, "the longest request fits"
        self._session.advance()
        ended = [(live, asked) for live, asked in self._lives.items() if live.generation is not None]
        for live, asked in ended:
            del self._lives[live]
            self._ended += asked.answer
        return [(asked, live.generation.token_ids) for live, asked in ended if live.generation is not None]

    def close(self) -> None:
        """End the session."""
        self._session.close()


@contextmanager
def mosaic_system(
    model: Model, name: str, *, device: str, budget_bytes: int | None, host_budget: int, seed: int
) -> Iterator[MosaicSystem]:
    """Give a Mosaic system by its name."""
    with mosaic.compile(model, device=device, budget=budget_bytes, host_budget=host_budget, seed=seed) as compiled:
        system = MosaicSystem(compiled, name.removeprefix(MOSAIC))
        try:
            yield system
        finally:
            system.close()
    _collect()
