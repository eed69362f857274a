"""dLLM-Serve's experiments: plain PyTorch loops and Mosaic's sessions serve the same requests under one budget.

    python -m benchmarks.dllm_serve llada-8b --device h200 --budget 24GiB --traffic burst --rates queued,0.5,1.5

Systems run one after another in this process; each point is written as soon as it is there. A rate is in requests a second;
`queued` lets requests always wait. Before its first point a system serves queued requests for a sixth of the time, which do not
count. Weights are random. Writes `dllm-serve-<traffic>-<model>-<device>.json`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch

from benchmarks.bench.meters import card, driver_bytes
from benchmarks.cases import Clock, cut, options, tag_of
from benchmarks.dllm_serve.driving import QUEUED, driven
from benchmarks.dllm_serve.systems import BASELINES, DEFAULT, MOSAIC, Loops, Made, beside_bytes, mosaic_system
from benchmarks.dllm_serve.tables import HEADER, rows_of
from benchmarks.dllm_serve.trace import KINDS, described, trace
from benchmarks.floor import Floor
from benchmarks.record import environment, table, write
from mosaic.devices import load_device
from mosaic.errors import MosaicError, UnknownName, UsageError
from mosaic.models import Model, load
from mosaic.units import parse_bytes

WARM: Final = 6
"""The part of a point's seconds that a system serves before its first point."""
METHOD: Final = (
    "one run of each point; tokens are those decided in its time; latencies are of requests that came in its first half, where "
    "one that has not ended counts with its age"
)


def rates_of(text: str) -> tuple[float, ...]:
    """`queued,0.5` as rates.

    >>> rates_of("queued,0.5")
    (inf, 0.5)
    """
    try:
        found = tuple(QUEUED if part == "queued" else float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not min(found) > 0:
        raise UsageError(f"--rates are requests a second, above 0, or 'queued', such as queued,0.5,1.5; got '{text}'.")
    return found


def systems_of(text: str) -> tuple[str, ...]:
    """`fast-dllm,mosaic:dual` as names of systems, baselines first."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in BASELINES and not name.startswith(MOSAIC):
            raise UnknownName("system", name, (*BASELINES, f"{MOSAIC}CACHE"))
    return (*(name for name in names if name in BASELINES), *(name for name in names if name not in BASELINES))


def points(model: Model, asked: argparse.Namespace, clock: Clock) -> Iterator[dict[str, Any]]:
    """Measure every system at every rate; yield each point, or why there is none, under `failed`."""
    cuda = load_device(asked.device).backend == "cuda"
    budget = asked.budget if cuda else None
    loops = Loops(model, cuda=cuda, budget_bytes=budget, seed=asked.seed)
    for name in clock.while_left(asked.systems, print):
        try:
            if name in BASELINES:
                yield from _of_system(name, loops.make(name), model, asked, clock, cuda)
                continue
            loops.close()
            more = {"device": asked.device, "budget_bytes": asked.budget, "host_budget": asked.host_budget}
            with mosaic_system(model, name, seed=asked.seed, **more) as system:
                yield from _of_system(name, Made(system), model, asked, clock, cuda)
        except (MosaicError, torch.OutOfMemoryError) as error:
            yield {"system": name, "failed": str(error).splitlines()[0]}


def _of_system(
    name: str, made: Made, model: Model, asked: argparse.Namespace, clock: Clock, cuda: bool
) -> Iterator[dict[str, Any]]:
    kind, system = KINDS[asked.traffic], made.system
    drive = partial(driven, system, arch=model.architecture, cuda=cuda)
    meter = getattr(system, "meter", None)
    requests = trace(kind, asked.seed)
    drive(requests, rate=QUEUED, seconds=asked.seconds / WARM)
    for rate in clock.while_left(asked.rates, print):
        if rate != QUEUED:
            system.reset()
            requests = trace(kind, asked.seed)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        since = len(meter.steps) if meter is not None else 0
        point = {
            "system": name,
            "units": made.units,
            "failed": None,
            **drive(requests, rate=rate, seconds=asked.seconds),
        }
        if meter is not None:
            floor = Floor(model.architecture, load_device(asked.device))
            point["floor_s"] = sum(step.floor_s(floor) for step in meter.steps[since:])
        if cuda:
            point["peak_bytes"] = driver_bytes(True) if meter else beside_bytes() + torch.cuda.max_memory_reserved()
        yield point


def main(arguments: Sequence[str]) -> None:
    """Measure a model, and record its figures."""
    parser = options(__doc__)
    parser.add_argument("--budget", type=parse_bytes, default="24GiB", help="of the device, for every system")
    parser.add_argument("--traffic", choices=[*KINDS], default="burst")
    parser.add_argument("--seconds", type=float, default=90.0, help="of a point")
    parser.add_argument("--rates", default="queued", help="requests a second, or queued")
    parser.add_argument("--systems", default=",".join(DEFAULT), help=f"among {', '.join(BASELINES)}, and {MOSAIC}CACHE")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.set_defaults(host_budget=0)  # no loop has weights in host memory, and sessions would, to admit more
    asked = parser.parse_args(arguments)
    if len(asked.models) > 1:
        raise UsageError("one model a process: systems are compared within it.")
    asked.rates, asked.systems = rates_of(asked.rates), systems_of(asked.systems)
    clock, (name,) = Clock.start(asked.minutes), asked.models
    found = list[dict[str, Any]]()
    result: dict[str, Any] = {
        "environment": environment(METHOD), "model": name, "layers": asked.layers, "device": asked.device,
        "card": card(asked.device != "cpu"), "budget_bytes": asked.budget, "traffic": asked.traffic, "seed": asked.seed,
        "trace": described(KINDS[asked.traffic], asked.seed), "seconds": asked.seconds, "points": found,
    }  # fmt: skip
    with torch.no_grad():
        for point in points(cut(load(name), asked.layers), asked, clock):
            found.append(point)
            print(table(HEADER, [*rows_of(result)][-1:]), flush=True)
            write(f"dllm-serve-{asked.traffic}-{name}-{asked.device}{tag_of(asked)}", result)
    print(table(HEADER, [*rows_of(result)]))


if __name__ == "__main__":
    main(sys.argv[1:])
