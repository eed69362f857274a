"""The engine under load: sessions as a server would drive them, from outside.

    python -m benchmarks.serving at-once sdar-8b --device h200 --counts 1,8,32,64,128

    python -m benchmarks.serving mixed llada-8b --device h200 --options '{"cache": "dual"}'

`at-once` submits some requests together (`benchmarks.at_once`), `mixed` serves random traffic queued and as it comes
(`benchmarks.traffic`), `delay` lets a long prompt come to running requests and `prefill` long prompts to an idle session
(`benchmarks.prompts`), `prefix` has requests begin alike (`benchmarks.shared_prefixes`), `memory` serves more than there is room
for, for `--minutes`, `ablation` does so without parts of the engine (`benchmarks.overload`), and `job` answers a file of prompts
(`benchmarks.jobs`). A step is one call of `advance`. Weights are random. Writes `serving-<what>-<model>-<device>.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import mosaic
from benchmarks.at_once import AT_ONCE, WARMING, at_once, at_once_row
from benchmarks.at_once import PASSES as TOGETHER
from benchmarks.bench.meters import card
from benchmarks.cases import Clock, cut, options, tag_of, token_counts
from benchmarks.jobs import JOB, UNCOUNTED, job_row, jobs
from benchmarks.overload import ABLATION, LOOKED, MEMORY, ablated, ablation_row, memory_row, overloaded
from benchmarks.prompts import BEFORE, DELAY, PREFILL, delay_row, delays, prefill_row, prefills
from benchmarks.prompts import PASSES as PREFILLS
from benchmarks.record import environment, source_line, table, write
from benchmarks.shared_prefixes import ADMITTED, OWN, PREFIXES, prefix_row, prefixes
from benchmarks.traffic import MIXED, POLICIES, mixed, mixed_row, policies_of
from mosaic.devices import load_device
from mosaic.errors import DoesNotFit
from mosaic.models import Model, load
from mosaic.runtime.compiled import CompiledModel
from mosaic.units import parse_tokens

__all__ = ["MEASURES", "header_of", "main", "rows_of", "section"]


class Measure(NamedTuple):
    """Something that is measured: how, what gives its points, and the columns and rows of its table."""

    method: str
    points: Callable[[Model, argparse.Namespace], Iterator[dict[str, Any]]]
    header: Sequence[str]
    row: Callable[[Mapping[str, Any]], list[str]]


def _compiled(model: Model, asked: argparse.Namespace, **more: Any) -> CompiledModel:
    return mosaic.compile(model, device=asked.device, budget=asked.budget, seed=3, **more)


def _at_once_points(model: Model, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    serve = {"prompt": asked.prompt, "answer": asked.answer, "tabled": not asked.generators, **asked.options}
    with _compiled(model, asked) as compiled:
        for count in asked.counts:
            try:
                yield {"count": count, **at_once(compiled, load_device(asked.device), count, **serve)}
            except DoesNotFit as error:
                print(count, error)


def _mixed_points(model: Model, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with _compiled(model, asked) as compiled:
        yield from mixed(compiled, asked.requests, warm=asked.warm, **_traffic_of(model, asked))


def _delay_points(model: Model, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with _compiled(model, asked) as compiled:
        for running in asked.counts:
            yield delays(compiled, running, asked.long, prompt=asked.prompt, answer=asked.answer, **asked.options)


def _prefill_points(model: Model, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with _compiled(model, asked) as compiled:
        yield from prefills(compiled, load_device(asked.device), asked.lengths, asked.chunk, **asked.options)


def _prefix_points(model: Model, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    sizes = {
        "long": max(asked.lengths),
        "prefix": min(asked.lengths),
        "count": asked.counts[-2:][0],
        "live": asked.counts[-1],
    }
    with _compiled(model, asked) as compiled:
        yield from prefixes(compiled, **sizes, answer=asked.answer, **asked.options)


def _memory_points(model: Model, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with _compiled(model, asked) as compiled:
        yield overloaded(compiled, 60 * asked.minutes, warm=asked.warm, **_traffic_of(model, asked))


def _ablation_points(model: Model, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    yield from ablated(partial(_compiled, model, asked), asked.requests, **_traffic_of(model, asked))


def _job_points(model: Model, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with _compiled(model, asked) as compiled:
        traffic = _traffic_of(model, asked)
        traffic.pop("tabled")
        yield from jobs(compiled, asked.requests, **traffic)


def _traffic_of(model: Model, asked: argparse.Namespace) -> dict[str, Any]:
    policies = asked.policies.split(",") if asked.policies else policies_of(model.architecture)
    return {
        "seed": asked.seed, "prompts": asked.prompts, "answers": asked.answers, "policies": policies,
        "tabled": not asked.generators, **asked.options,
    }  # fmt: skip


MEASURES: Final = {
    "at-once": Measure(
        f"tokens per second are the median of {TOGETHER} passes, after {WARMING} that are not counted; steps are of all of them",
        _at_once_points, AT_ONCE, at_once_row,
    ),
    "mixed": Measure(
        "one pass of each kind; percentiles are of all steps and all requests", _mixed_points, MIXED, mixed_row
    ),
    "delay": Measure(
        f"one pass, after one that is not counted; before it come {BEFORE} steps of the running requests alone",
        _delay_points, DELAY, delay_row,
    ),
    "prefill": Measure(
        f"median of {PREFILLS} passes, after {WARMING} that are not counted, each from its submission to the first step "
        "that decides, without that step",
        _prefill_points, PREFILL, prefill_row,
    ),
    "prefix": Measure(
        f"first blocks are the median of {PREFILLS} passes, after {WARMING} that are not counted, those together of a second one, "
        f"admission of {ADMITTED} requests; each prompt has {OWN} tokens of its own behind the prefix",
        _prefix_points, PREFIXES, prefix_row,
    ),
    "memory": Measure(
        f"one run; the driver's counter is read every {LOOKED} steps, pages are compared after each", _memory_points, MEMORY,
        memory_row,
    ),
    "job": Measure(
        f"one pass of each, after {UNCOUNTED} requests that are not counted", _job_points, JOB, job_row
    ),
    "ablation": Measure(
        "one pass of each, after one that is not counted; requests per GiB are those that were live together, by the budget "
        "without the weights",
        _ablation_points, ABLATION, ablation_row,
    ),
}  # fmt: skip


def header_of(result: Mapping[str, Any]) -> Sequence[str]:
    """Return the columns of a run's table."""
    return MEASURES[result["what"]].header


def rows_of(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows for a table, one a point."""
    yield from map(MEASURES[result["what"]].row, result["points"])


_TITLES: Final = {
    "at-once": "Requests that are submitted together", "mixed": "Random traffic", "delay": "A long prompt beside running requests",
    "prefill": "Prompts in chunks", "prefix": "Prompts that begin alike", "memory": "More traffic than there is room for",
    "job": "Jobs of many prompts", "ablation": "Without parts of the engine",
}  # fmt: skip


def section(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables of all runs, by what they measure."""
    parts = []
    for what, title in _TITLES.items():
        for result in results:
            if result["what"] == what:
                options = result["asked"]["options"]
                given = f", `{json.dumps(options)}`" if options else ""
                titled = f"**{title}: {result['model']}{given}**"
                parts += [titled, table(MEASURES[what].header, [*rows_of(result)]), source_line(result)]
    return "\n\n".join(parts)


def main(arguments: Sequence[str]) -> None:
    """Measure models, and record the figures of each."""
    parser = options(__doc__)
    parser.prog += f" {{{','.join(MEASURES)}}}"
    parser.add_argument("--counts", type=token_counts, default=(1, 8, 32, 64, 128), help="requests at once")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt, of requests at once")
    parser.add_argument("--answer", type=int, default=256, help="tokens of each answer, of requests at once")
    parser.add_argument(
        "--long",
        type=parse_tokens,
        default=16384,
        help="tokens of the prompt that comes to running requests",
    )
    parser.add_argument(
        "--lengths",
        type=token_counts,
        default=(4096, 8192, 16384),
        help="of prefills; of prefixes, the shortest is shared, and the longest comes twice",
    )
    parser.add_argument("--chunk", type=parse_tokens, default=2048, help="tokens of a chunk, of prefills")
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
    parser.add_argument(
        "--warm",
        type=int,
        default=128,
        help="requests whose steps are planned first, of memory and mixed traffic; 0: none",
    )
    parser.add_argument("--options", type=json.loads, default={}, help="of all requests, as JSON")
    parser.add_argument("--generators", action="store_true", help="no table: the host decodes each request")
    parser.add_argument("--budget", help="of the card; all of it if not given")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    what, *given = arguments or ["--help"]
    asked = parser.parse_args(given if what in MEASURES else ["--help"])
    clock = Clock.start(asked.minutes)
    for name in asked.models:
        result: dict[str, Any] = {"environment": environment(MEASURES[what].method), "what": what, "model": name}
        result |= {"device": asked.device, "card": card(asked.device != "cpu"), "asked": vars(asked), "points": []}
        for point in MEASURES[what].points(cut(load(name), asked.layers), asked):
            result["points"].append(point)
            print(table(header_of(result), [*rows_of(result)][-1:]), flush=True)
            write(f"serving-{what}-{name}-{asked.device}{tag_of(asked)}", result)
            if clock.left_s <= 0:
                print(f"no time left for more than {len(result['points'])} points")
                break
        print(table(header_of(result), list(rows_of(result))))


if __name__ == "__main__":
    main(sys.argv[1:])
