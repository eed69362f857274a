"""The engine under load: sessions as a server would drive them, from outside.

    python -m benchmarks.serving at-once sdar-8b --device h200 --counts 1,8,32,64,128

    python -m benchmarks.serving mixed llada-8b --device h200 --options '{"cache": "dual"}'

`at-once` submits some requests together and serves them to their ends: one pass that is not counted, in which sizes of steps are
planned and captured, then passes that are. A step is one call of `advance`. In a last pass, halfway, Python's calls of some
steps are counted, and some are profiled: the device's time of a step is when any kernel runs, and what its wall time has beyond is
the host's. `mixed` serves random traffic (`benchmarks.traffic`).

Weights are random. Writes
`serving-<what>-<model>-<device>.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

import mosaic
from benchmarks.bench.meters import card, synchronise
from benchmarks.cases import Clock, cut, device_of, options, tag_of, token_counts
from benchmarks.eviction import NewSizes
from benchmarks.floor import Floor
from benchmarks.record import environment, table, write
from benchmarks.served import Meter
from benchmarks.step_kernels import kernel_ms
from benchmarks.traffic import POLICIES, mixed, percentiles, policies_of, prompt_of, useful
from mosaic.decoding import LiveRequest, Session
from mosaic.devices import Device
from mosaic.errors import DoesNotFit
from mosaic.models import load
from mosaic.models.architecture import Architecture
from mosaic.runtime.compiled import CompiledModel

__all__ = ["MEASURES", "at_once", "header_of", "main", "rows_of"]

PROMPT, ANSWER = 512, 256
COUNTS: Final = (1, 8, 32, 64, 128)
PASSES: Final = 2
PROBED: Final = 8
"""Steps halfway whose Python calls are counted, and as many again that are profiled."""


# --- all at once --------------------------------------------------------------------------------------------------------


class Pass(NamedTuple):
    """Some requests from their submission to the end of the last: seconds, milliseconds of each step, tokens of the answers."""

    seconds: float
    steps_ms: list[float]
    tokens: int


def at_once(
    model: CompiledModel, device: Device, count: int, *, prompt: int = PROMPT, answer: int = ANSWER, tabled: bool = True,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Serve requests that are submitted together; return speed, steps, what is useful of them, and the host's part."""
    new = NewSizes(model)
    serve = {"count": count, "prompt": prompt, "answer": answer, **more}
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
    near = statistics.median(passes[-1].steps_ms[halfway : halfway + 2 * PROBED])
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

    def note(_frame: object, event: str, _given: object) -> None:
        nonlocal calls
        calls += event == "call"

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
    busy = busy_ms([(event.time_range.start, event.time_range.end) for event in events]) / PROBED
    kinds = kernel_ms([(event.name, event.device_time) for event in events], PROBED)
    return {**found, "device_ms": busy, "host_ms": step_ms - busy, "kernels_ms": kinds}


def busy_ms(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the milliseconds in which any of some intervals of microseconds is.

    >>> busy_ms([(0, 2000), (1000, 3000), (5000, 6000)])
    4.0
    """
    busy = end = 0.0
    for start, stop in sorted(intervals):
        busy += max(stop - max(start, end), 0)
        end = max(end, stop)
    return busy / 1e3


TIMES: Final = ("a step, ms", "99th, ms", "longest, ms")
AT_ONCE: Final = (
    "requests", "tokens/s", "steps", *TIMES, "useful rows", "of the floor", "new sizes",
    "Python calls", "device, ms", "beyond it, ms", "kernels: products, attention, selection, others, ms",
)  # fmt: skip

MIXED: Final = (
    "run", "requests", "tokens/s", "of the queued", "steps", *TIMES, "a request, ms", "99th, ms", "longest, ms", "large steps",
    "of predicted: median, 99th", "to submit, ms", "useful rows", "new sizes", "same answers", "refused",
)  # fmt: skip


def _at_once_row(point: Mapping[str, Any]) -> list[str]:
    kernels = ", ".join(f"{ms:.1f}" for ms in point.get("kernels_ms", {}).values())
    return [
        f"{point['count']}", f"{point['tokens_per_s']:,.0f}", f"{point['steps']:,.0f}", *_step_times(point),
        f"{point['useful']:.1%}", f"{point['of_floor']:.2f}", f"{point['new_sizes']}", f"{point['python_calls']:,.0f}",
        *(f"{point[name]:.2f}" if name in point else "" for name in ("device_ms", "host_ms")), kernels,
    ]  # fmt: skip


def _step_times(point: Mapping[str, Any], name: str = "") -> list[str]:
    return [f"{point[f'{name}{which}_ms']:.2f}" for which in ("median", "p99", "most")]


def _mixed_row(point: Mapping[str, Any]) -> list[str]:
    over = [f"{point[name]:.2f}" if name in point else "" for name in ("of_predicted", "of_predicted_p99")]
    return [
        point["run"], f"{point['requests']}", f"{point['tokens_per_s']:,.0f}", f"{point['of_queued']:.2f}", f"{point['steps']:,}",
        *_step_times(point), *_step_times(point, "latency_"), f"{point['large_steps']}", ", ".join(over),
        f"{point['submit_ms']:.2f}", f"{point['useful']:.1%}",
        *(f"{point[name]}" for name in ("new_sizes", "same_as_queued", "refused")),
    ]  # fmt: skip


# --- tables and records -------------------------------------------------------------------------------------------------


class Measure(NamedTuple):
    """Something that is measured: how, what gives its points, and the columns and rows of its table."""

    method: str
    points: Callable[[CompiledModel, Device, argparse.Namespace], Iterator[dict[str, Any]]]
    header: Sequence[str]
    row: Callable[[Mapping[str, Any]], list[str]]


def _at_once_points(model: CompiledModel, device: Device, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for count in asked.counts:
        serve = {"prompt": asked.prompt, "answer": asked.answer, "tabled": not asked.generators, **asked.options}
        try:
            yield {"count": count, **at_once(model, device, count, **serve)}
        except DoesNotFit as error:
            print(count, error)


def _mixed_points(model: CompiledModel, device: Device, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    yield from mixed(model, asked.requests, **_traffic_of(model, asked))


def _traffic_of(model: CompiledModel, asked: argparse.Namespace) -> dict[str, Any]:
    policies = asked.policies.split(",") if asked.policies else policies_of(model.architecture)
    return {
        "seed": asked.seed, "prompts": asked.prompts, "answers": asked.answers, "policies": policies,
        "tabled": not asked.generators, **asked.options,
    }  # fmt: skip


MEASURES: Final = {
    "at-once": Measure(
        f"tokens per second are the median of {PASSES} passes, after one that is not counted; steps are of all of them",
        _at_once_points, AT_ONCE, _at_once_row,
    ),
    "mixed": Measure(
        "one pass of each kind; percentiles are of all steps and all requests", _mixed_points, MIXED,
        _mixed_row,
    ),
}  # fmt: skip


def header_of(result: Mapping[str, Any]) -> Sequence[str]:
    """Return the columns of a run's table."""
    return MEASURES[result["what"]].header


def rows_of(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows for a table, one a point."""
    yield from map(MEASURES[result["what"]].row, result["points"])


def main(arguments: Sequence[str]) -> None:
    """Measure models, and record the figures of each."""
    parser = options(__doc__)
    parser.prog += f" {{{','.join(MEASURES)}}}"
    parser.add_argument("--counts", type=token_counts, default=COUNTS, help="requests at once")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of each prompt, of requests at once")
    parser.add_argument("--answer", type=int, default=ANSWER, help="tokens of each answer, of requests at once")
    parser.add_argument("--requests", type=int, default=256, help="of traffic")
    parser.add_argument(
        "--prompts", type=token_counts, default=(64, 4096), help="the shortest and the longest, of traffic"
    )
    parser.add_argument(
        "--answers", type=token_counts, default=(32, 512), help="the shortest and the longest, of traffic"
    )
    parser.add_argument(
        "--policies", help=f"of traffic, among {', '.join(POLICIES)}; all that the model takes if not given"
    )
    parser.add_argument("--options", type=json.loads, default={}, help="of all requests, as JSON")
    parser.add_argument("--generators", action="store_true", help="no table: the host decodes each request")
    parser.add_argument("--budget", help="of the card; all of it if not given")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    what, *given = arguments or ["--help"]
    asked = parser.parse_args(given if what in MEASURES else ["--help"])
    clock, chosen = Clock.start(asked.minutes), {**vars(asked), "models": asked.models}
    for name in asked.models:
        result: dict[str, Any] = {"environment": environment(MEASURES[what].method), "what": what, "model": name}
        result |= {"device": asked.device, "card": card(asked.device != "cpu"), "asked": chosen, "points": []}
        described, budget = cut(load(name), asked.layers), asked.budget
        with mosaic.compile(described, device=asked.device, budget=budget, seed=3) as model:
            for point in MEASURES[what].points(model, device_of(result), asked):
                result["points"].append(point)
                print(table(header_of(result), [*rows_of(result)][-1:]), flush=True)
                write(f"serving-{what}-{name}-{asked.device}{tag_of(asked)}", result)
                if clock.left_s <= 0:
                    print(f"no time left for more than {len(result['points'])} points")
                    break
        print(table(header_of(result), list(rows_of(result))))


if __name__ == "__main__":
    main(sys.argv[1:])
