"""Long prompts in a session: how long others wait while one comes in, and what chunks of it cost beside one whole prefill."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from benchmarks.at_once import WARMING
from benchmarks.eviction import NewSizes
from benchmarks.floor import Floor
from benchmarks.served import Meter
from benchmarks.traffic import prompt_of
from mosaic.decoding import GenerationConfig, LiveRequest, Session
from mosaic.decoding.scheduler import DELAY_MS
from mosaic.devices import Device
from mosaic.runtime.compiled import CompiledModel

__all__ = ["BEFORE", "DELAY", "PASSES", "PREFILL", "delay_row", "delays", "prefill_row", "prefills"]

BEFORE: Final = 32
"""Steps whose gaps a delay is compared with."""
PASSES: Final = 3
"""Passes whose median a prefill takes, after `WARMING` that are not counted."""


def delays(
    model: CompiledModel, running: int, long: int, *, prompt: int, answer: int, max_delay_ms: float = DELAY_MS, **more: Any
) -> dict[str, Any]:  # fmt: skip
    """Let a long prompt come to running requests; return the longest that one of these waits between two of its steps.

    Parameters
    ----------
    running
        Requests that are inside their blocks.
    long
        Tokens of the prompt that comes.
    prompt, answer
        Tokens of the others' prompts, and of all answers.
    max_delay_ms
        The session's bound. Sessions are warm.
    """
    _delayed(model, running, long, prompt=prompt, answer=answer, max_delay_ms=max_delay_ms, **more)  # not counted
    new = NewSizes(model)
    found = _delayed(model, running, long, prompt=prompt, answer=answer, max_delay_ms=max_delay_ms, **more)
    return {**found, "running": running, "long": long, "max_delay_ms": max_delay_ms, "new_sizes": new.count()}


def _delayed(
    model: CompiledModel, running: int, long: int, *, prompt: int, answer: int, max_delay_ms: float, **more: Any
) -> dict[str, Any]:  # fmt: skip
    arch, generator = model.architecture, torch.Generator().manual_seed(long)
    meter, asked = Meter(model), {"gen_length": answer, "stop_at_eos": False, **more}
    with Session(meter, max_delay_ms=max_delay_ms) as session:
        session.warm(GenerationConfig(**asked), requests=running + 1, tokens=long + answer)
        others = [session.submit(prompt_of(arch, prompt, generator), **asked) for _ in range(running)]
        while any(request.steps == 0 for request in others) or meter.steps[-1].prompts:
            session.advance()
        session.advance(BEFORE)
        gaps, before = _Gaps(others), list[float]()
        for _ in range(BEFORE):
            session.advance()
            before += gaps.after_step()
        first, owed = len(meter.steps), long // arch.block * arch.block if arch.block else 0
        began, late = time.perf_counter(), session.submit(prompt_of(arch, long, generator), **asked)
        during = list[float]()
        while late.steps == 0 or owed > sum([step.prompts for step in meter.steps[first:]]):
            session.advance()
            during += gaps.after_step()
        prefill_s = time.perf_counter() - began
        chunks = [step for step in meter.steps[first:] if step.prompts or step.refreshed]
        sizes = [step.prompts + step.refreshed for step in chunks]
        assert all(request.generation is None for request in others), "the others' answers are too short"
    return {
        "before_ms": statistics.median(before), "before_most_ms": max(before), "during_most_ms": max(during),
        "during_ms": statistics.median(during), "prefill_s": prefill_s, "chunks": len(chunks),
        "chunk_tokens": [min(sizes), max(sizes)],
        "predicted_most_ms": max(step.predicted_ms for step in chunks),
    }  # fmt: skip


class _Gaps:
    """Milliseconds between two steps of each of some requests."""

    def __init__(self, requests: Sequence[LiveRequest]) -> None:
        self._requests, now = requests, time.perf_counter()
        self._steps, self._since = [request.steps for request in requests], [now] * len(requests)

    def after_step(self) -> list[float]:
        """Return the gaps that end with the step that has just run."""
        found, now = [], time.perf_counter()
        for place, request in enumerate(self._requests):
            if request.steps > self._steps[place]:
                found.append(1e3 * (now - self._since[place]))
                self._steps[place], self._since[place] = request.steps, now
        return found


def prefills(
    model: CompiledModel, device: Device, lengths: Sequence[int], chunk: int, **more: Any
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Time prompts that come to an idle session, in chunks and whole; a pass ends with the first step that decides.

    That step is taken off, as the median of those that follow it.
    """
    floor = Floor(model.architecture, device)
    for length in lengths:
        whole = None
        for size in (length, chunk):
            passes = [_prefilled(model, length, size, floor, **more) for _ in range(WARMING + PASSES)][WARMING:]
            seconds = statistics.median(found["seconds"] for found in passes)
            whole = whole or seconds
            found = {**passes[0], "seconds": seconds, "tokens_per_s": length / seconds, "of_whole": whole / seconds}
            yield {"prompt": length, "chunk": size, **found, "of_floor": seconds / found["floor_s"]}


def _prefilled(model: CompiledModel, length: int, chunk: int, floor: Floor, **more: Any) -> dict[str, Any]:
    meter, arch = Meter(model), model.architecture
    prompt = prompt_of(arch, length, torch.Generator().manual_seed(length))
    with Session(meter, max_num_batched_tokens=chunk) as session:
        began = time.perf_counter()
        session.submit(prompt, gen_length=2 * (arch.block or 32), stop_at_eos=False, **more)
        while not meter.steps or meter.steps[-1].prompts:
            session.advance()
        until_decided, after = time.perf_counter() - began, list[float]()
        while session.live:
            at = time.perf_counter()
            session.advance()
            after.append(time.perf_counter() - at)
    chunks = [step for step in meter.steps if step.prompts or step.refreshed][: 1 if not arch.block else None]
    return {
        "seconds": until_decided - statistics.median(after), "chunks": len(chunks),
        "floor_s": sum(step.floor_s(floor) for step in chunks),
    }  # fmt: skip


DELAY: Final = (
    "running", "prompt", "bound, ms", "between steps, ms", "longest, ms", "beside the prompt, ms", "longest, ms",
    "predicted at most, ms", "prefill, s", "chunks", "tokens of a chunk", "new sizes",
)  # fmt: skip
PREFILL: Final = ("prompt", "tokens of a chunk", "chunks", "ms", "tokens/s", "of the whole", "of the floor")


def delay_row(point: Mapping[str, Any]) -> list[str]:
    """Return a point's row of the table."""
    times = ("before_ms", "before_most_ms", "during_ms", "during_most_ms", "predicted_most_ms")
    return [
        f"{point['running']}", f"{point['long']:,}", f"{point['max_delay_ms']:g}", *(f"{point[name]:.1f}" for name in times),
        f"{point['prefill_s']:.2f}", f"{point['chunks']}", " to ".join(f"{tokens:,}" for tokens in point["chunk_tokens"]),
        f"{point['new_sizes']}",
    ]  # fmt: skip


def prefill_row(point: Mapping[str, Any]) -> list[str]:
    """Return a point's row of the table."""
    return [
        f"{point['prompt']:,}", f"{point['chunk']:,}", f"{point['chunks']}", f"{1e3 * point['seconds']:.1f}",
        f"{point['tokens_per_s']:,.0f}", f"{point['of_whole']:.3f}", f"{point['of_floor']:.2f}",
    ]  # fmt: skip
