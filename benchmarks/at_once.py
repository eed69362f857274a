"""Requests that are submitted together: their speed, their steps, and what of these is the host's."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from inspect import getsourcefile
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.bench.meters import synchronise
from benchmarks.eviction import NewSizes
from benchmarks.floor import Floor
from benchmarks.served import TIMES, Meter, percentiles, shown_times, useful
from benchmarks.step_kernels import kernel_ms
from benchmarks.traffic import prompt_of
from mosaic.decoding import LiveRequest, Session
from mosaic.devices import Device
from mosaic.models.architecture import Architecture
from mosaic.runtime.compiled import CompiledModel

__all__ = ["AT_ONCE", "PASSES", "at_once", "at_once_row", "busy_ms"]

PASSES: Final = 2
WARMING: Final = 2
"""Passes before these: a size of step is bound when it first comes, and captured when it comes again."""
PROBED: Final = 8
"""Steps halfway whose Python calls are counted, and as many again that are profiled."""
WITHIN_US: Final = 5.0
"""A gap between kernels up to which the card starts the next one of a graph: it waits for no host."""


_METER: Final = getsourcefile(Meter)
"""Whose calls are not the session's."""


class Pass(NamedTuple):
    """Some requests from their submission to the end of the last: seconds, milliseconds of each step, tokens of the answers."""

    seconds: float
    steps_ms: list[float]
    tokens: int


def at_once(
    model: CompiledModel, device: Device, count: int, *, prompt: int, answer: int, tabled: bool = True,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Serve requests that are submitted together; return speed, steps, what is useful of them, and the host's part."""
    new = NewSizes(model)
    serve = {"count": count, "prompt": prompt, "answer": answer, **more}
    for _ in range(WARMING):
        _passed(Meter(model, tabled=tabled), **serve)
    warm_sizes, meter = new.count(), Meter(model, tabled=tabled)
    passes = [_passed(meter, **serve) for _ in range(PASSES)]
    new_sizes = new.count()
    times = [ms for one in passes for ms in one.steps_ms]
    floor, served = Floor(model.architecture, device), meter.steps
    wall = 1e3 * sum(one.seconds for one in passes)
    found = {
        "tokens_per_s": statistics.median(one.tokens / one.seconds for one in passes), "steps": len(times) / PASSES,
        **percentiles(times), "useful": useful(served),
        "of_floor": wall / (1e3 * sum(step.floor_s(floor) for step in served)), "warm_sizes": warm_sizes, "new_sizes": new_sizes,
    }  # fmt: skip
    halfway = len(passes[-1].steps_ms) // 2
    same = slice(halfway + PROBED, halfway + 2 * PROBED)  # as those that are profiled: steps of one pass differ in size
    near = min([statistics.fmean(one.steps_ms[same] or one.steps_ms) for one in passes])
    return found | _probed(Meter(model, tabled=tabled), halfway, near, **serve)


def _submitted(
    session: Session, arch: Architecture, *, count: int, prompt: int, answer: int, **more: Any
) -> list[LiveRequest]:  # fmt: skip
    generator = torch.Generator().manual_seed(count)
    asked = {"gen_length": answer, "stop_at_eos": False, **more}
    return [session.submit(prompt_of(arch, prompt, generator), **asked) for _ in range(count)]


def timed(step: Callable[[], object]) -> float:
    """Return the milliseconds of a call."""
    began = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - began)


def _passed(meter: Meter, **serve: Any) -> Pass:
    with Session(meter) as session:
        began, times = time.perf_counter(), list[float]()
        requests = _submitted(session, meter.architecture, **serve)
        while session.live:
            times.append(timed(session.advance))
        seconds = time.perf_counter() - began
        answers = [request.generation for request in requests]
        return Pass(seconds, times, sum([len(answer.token_ids) for answer in answers if answer is not None]))


def _probed(meter: Meter, halfway: int, step_ms: float, **serve: Any) -> dict[str, Any]:
    """Python's calls of a step halfway, and on a card how long its kernels run, by kind, and what the step takes beyond."""
    calls = 0

    def note(frame: FrameType, event: str, _given: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename != _METER

    with Session(meter) as session:
        _submitted(session, meter.architecture, **serve)
        session.advance(halfway)
        before = sys.getprofile()
        sys.setprofile(note)
        session.advance(PROBED)
        sys.setprofile(before)
        found = {"python_calls": calls / PROBED, "near_ms": step_ms}
        if not meter.asynchronous:
            return found
        synchronise(cuda=True)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            session.advance(PROBED)
            synchronise(cuda=True)
    events = [event for event in profiled.events() if event.device_type.name == "CUDA"]
    intervals = [(event.time_range.start, event.time_range.end) for event in events]
    busy, runs = (busy_ms(intervals, within) / PROBED for within in (0.0, WITHIN_US))
    kinds = kernel_ms([(event.name, event.device_time) for event in events], PROBED)
    return {**found, "device_ms": busy, "between_ms": runs - busy, "host_ms": step_ms - runs, "kernels_ms": kinds}


def busy_ms(intervals: Sequence[tuple[float, float]], within: float = 0.0) -> float:
    """Return the milliseconds in which any of some intervals of microseconds is, gaps of at most `within` microseconds included.

    >>> busy_ms([(0, 2000), (1000, 3000), (5000, 6000)])
    4.0
    >>> busy_ms([(0, 2000), (2003, 3000), (5000, 6000)], within=5)
    4.0
    """
    busy, end = 0.0, min([start for start, _ in intervals], default=0.0)
    for start, stop in sorted(intervals):
        busy += max(stop - (end if start - end <= within else start), 0)
        end = max(end, stop)
    return busy / 1e3


AT_ONCE: Final = (
    "requests", "tokens/s", "steps", *TIMES, "useful rows", "of the floor", "new sizes",
    "Python calls", "device, ms", "between kernels, ms", "beyond it, ms", "kernels: products, attention, selection, others, ms",
)  # fmt: skip


def at_once_row(point: Mapping[str, Any]) -> list[str]:
    """Return a point's row of the table."""
    kernels = ", ".join(f"{ms:.1f}" for ms in point.get("kernels_ms", {}).values())
    return [
        f"{point['count']}", f"{point['tokens_per_s']:,.0f}", f"{point['steps']:,.0f}", *shown_times(point),
        f"{point['useful']:.1%}", f"{point['of_floor']:.2f}", f"{point['new_sizes']}", f"{point['python_calls']:,.0f}",
        *(f"{point[name]:.2f}" if name in point else "" for name in ("device_ms", "between_ms", "host_ms")), kernels,
    ]  # fmt: skip
