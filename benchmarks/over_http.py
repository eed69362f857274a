"""What HTTP and the server cost: the same requests to the engine alone, and over HTTP to `mosaic serve`.

    python -m benchmarks.over_http sdar-8b --device h200 --traffic short --counts 64,128 --per-forward 2 --eviction off \
        --poisson 0.8 --burst 128

A closed loop has `--counts` requests in flight; who ends is followed by the next one. The engine alone is driven by a stream as the
server's engine is, in a process of its own (`benchmarks.engine_alone`), which is gone before the server starts: each has the whole
card. Both are warm as `mosaic serve` is. Prompts are random words, one token each. Tokens per forward are forced by the steps of a
block, drawn from the seed where no whole number of steps gives them, with a threshold that nothing reaches; weights are random, and
no answer ends early. Before each point comes one with short answers that is not counted.

`--poisson` lets requests come at random, at this share of the most requests per second that a closed loop over HTTP has answered.
`--burst` sends requests all at once, of which each needs one step behind its prompt for its first token; the floor is that of all
prompts and of that step (`benchmarks.floor`). The engine begins nothing new after a share of `--minutes`; over HTTP comes what the
engine has done. SIGTERM ends what was started.
Writes `over-http-<model>-<device>.json` after each point.
"""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks import sources
from benchmarks.cases import Clock, options, parse_ratio, tag_of, token_counts, with_block
from benchmarks.floor import Floor
from benchmarks.record import ROOT, environment, source_line, table, write
from mosaic.bench import TRAFFIC, Load, measure
from mosaic.devices import load_device
from mosaic.errors import MosaicError
from mosaic.models import Model

__all__ = ["HEADER", "figures", "load_of", "main", "rows_of", "section"]

LENGTHS: Final[Mapping[str, tuple[int, int]]] = {"short": (512, 256), "long": (4096, 1536)}
"""Tokens of each prompt and of each answer."""
EVICTION: Final[Mapping[str, Mapping[str, Any]]] = {
    "off": {}, "on": {"eviction": "focus"}, "on+dc+": {"eviction": "focus", "block_cache": "dc+"}
}  # fmt: skip
CLOSED, POISSON, BURST = "closed loop", "Poisson", "at once"
UNCOUNTED: Final = 64
"""Tokens of an answer that is not counted, at most."""
LEAST: Final = 8
"""Requests of a point, at least."""
ENGINE: Final = 0.45
"""Of the minutes, the share after which the engine alone begins nothing new."""
START_S: Final = 400.0
LINES: Final = 30
"""Of a server's log, the last ones but those of requests, which are shown where it fails."""
METHOD: Final = (
    "one pass of sessions that are warm, after an uncounted one of as many requests as are in flight, with other prompts and "
    "answers of 64 tokens at most, Poisson processes without it; percentiles are of all requests"
)
_TIMES: Final = ("ttft", "tpot", "e2el")
_PERCENTILES: Final = (50, 95, 99)


# --- requests -----------------------------------------------------------------------------------------------------------


def loops(asked: Any) -> list[dict[str, Any]]:
    """The points that are measured with and without HTTP."""
    closed: list[dict[str, Any]] = [
        {
            "load": CLOSED, "eviction": asked.eviction, "per_forward": per_forward, "count": count,
            "requests": max(LEAST, asked.rounds * count),
        }
        for per_forward, count in product(asked.per_forward, asked.counts)
    ]  # fmt: skip
    burst = {
        "load": BURST, "eviction": asked.eviction, "per_forward": asked.block, "count": asked.burst, "requests": asked.burst,
    }  # fmt: skip
    return [*closed, burst] if asked.burst else closed


def written(path: Path, point: Mapping[str, Any], asked: Any, model: Model, *, counted: bool = True) -> Path:
    """Write the trace of a point's requests. No other trace has their prompts; what is not counted has answers that are short."""
    rng, of_words, at_s = random.Random(asked.seed), random.Random(f"{asked.seed}, {counted}, {point}"), 0.0
    answer = asked.answer if counted else min(asked.answer, UNCOUNTED)
    steps, vocabulary = asked.block / point["per_forward"], model.architecture.vocabulary
    lines = []
    for _ in range(point["requests"] if counted else point["count"]):
        body = {"steps": int(steps) + (rng.random() < steps % 1), "threshold": 1.0, **EVICTION[point["eviction"]]}
        prompt = " ".join(map(str, of_words.choices(range(vocabulary), k=asked.prompt)))
        lines.append({"at_s": at_s, "prompt": prompt, "output_length": answer, "extra_body": body})
        at_s += rng.expovariate(point["rate"]) if "rate" in point else 0.0
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def load_of(trace: str | Path, point: Mapping[str, Any], base_url: str = "http://none", model: str = "") -> Load:
    """What is sent of a trace: in a closed loop, or as it comes."""
    return Load(
        base_url=base_url, model=model, lengths=TRAFFIC["short"], trace=Path(trace),
        requests=len(Path(trace).read_text().splitlines()),
        concurrency=point["count"] if point["load"] == CLOSED else None, body={"ignore_eos": True},
    )  # fmt: skip


def figures(found: Mapping[str, Any]) -> dict[str, Any]:
    """What a record keeps of the results of a load, in milliseconds and seconds; `first_s` is until all have a first token."""
    began = min(found["start_times"])
    return {
        "tokens_per_s": found["output_throughput"], "requests_per_s": found["request_throughput"], "seconds": found["duration"],
        "prompt_tokens": found["total_input_tokens"], "tokens": found["total_output_tokens"], "failed": found["failed"],
        **{f"{name}_ms": [found[f"p{share}_{name}_ms"] for share in _PERCENTILES] for name in _TIMES},
        "first_s": max(map(sum, zip(found["start_times"], found["ttfts"], strict=True))) - began,
        "forwards_per_token": found.get("forwards_per_token"),
    }  # fmt: skip


def floor_s(model: Model, device: str, asked: Any) -> float:
    """The least seconds until each of the requests at once has a first token: all prompts, and a step over a block of each."""
    arch, count, block = model.architecture, asked.burst, asked.block
    floor, whole = Floor(arch, load_device(device)), asked.prompt // block * block
    layers, keys = [1.0] * arch.layers, float(count * whole)
    prompts = floor.of(tokens=keys, rows=0, keys=[keys * one for one in layers], requests=count, prefill=True)
    blocks = float(count * block)
    return prompts + floor.of(
        tokens=blocks, rows=blocks, keys=[(keys + blocks) * one for one in layers], requests=count
    )


# --- the engine, and the server ---------------------------------------------------------------------------------------


def engine_alone(
    folder: Path, points: Sequence[dict[str, Any]], asked: Any, minutes: float
) -> Iterator[dict[str, Any]]:
    """Yield what the engine alone says of each point, in order, until it has ended."""
    case = {
        "model": str(folder), "compile": compiling(asked), "options": EVICTION[asked.eviction], "minutes": minutes,
        "points": points,
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.engine_alone", json.dumps(case)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                found: dict[str, Any] = json.loads(line)
                sources.also(found.pop("files"))
                yield found
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        print(f"the engine alone ended with code {process.returncode}", flush=True)


def compiling(asked: Any) -> dict[str, Any]:
    """Options of the model, alone and behind the server."""
    return {"device": asked.device, "host_budget": "0", "dtype": "float32" if asked.device == "cpu" else None}


@contextmanager
def server(folder: Path, name: str, asked: Any, log: Path) -> Iterator[str]:
    """The address of a server, which ends with the block; what it says goes to a log."""
    given = {name.replace("_", "-"): value for name, value in compiling(asked).items() if value is not None}
    given |= {"load-format": "dummy", "served-name": name, "port": "0", "drain-timeout": "1"}
    given["override-generation-config"] = json.dumps(EVICTION[asked.eviction])
    command = [sys.executable, "-m", "mosaic", "serve", str(folder)]
    command += [part for option, value in given.items() for part in (f"--{option}", value)]
    began = time.monotonic()
    with log.open("w") as said, subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT) as process:
        try:
            while (found := re.search(r"serving .* on (http://\S+)", log.read_text())) is None:
                if process.poll() is not None or time.monotonic() - began > START_S:
                    raise SystemExit(f"the server has not started:\n{end_of(log)}")
                time.sleep(0.2)
            yield found[1]
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def end_of(log: Path) -> str:
    """The last lines of a log that are of no request."""
    return "\n".join([line for line in log.read_text().splitlines() if " path=/" not in line][-LINES:])


def over_http(point: Mapping[str, Any], url: str, name: str, log: Path) -> dict[str, Any]:
    """The figures of a point over HTTP, or why there are none."""
    try:
        *uncounted, trace = point["traces"]
        for one in uncounted:
            measure(load_of(one, point, url, name))
        found = measure(load_of(trace, point, url, name))
        if found["completed"]:
            return figures(found)
        error = next(filter(None, found["errors"]))
    except MosaicError as failed:
        error = str(failed)
    print(f"{error}\n{end_of(log)}", flush=True)
    return {"error": error}


# --- tables -------------------------------------------------------------------------------------------------------------

HEADER: Final = (
    "load", "eviction", "tokens a forward, forced", "requests", "the engine, tokens/s", "over HTTP, tokens/s", "of the engine",
    *(f"{what}: {', '.join(f'{one}th' for one in _PERCENTILES)}" for what in ("first token, ms", "a token, ms", "a request, ms")),
    "tokens a forward, told", "failed", "new sizes",
)  # fmt: skip
AT_ONCE: Final = ("requests at once", "floor, s", "the engine, s", "of the floor", "over HTTP, s", "of the floor")


def rows_of(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows of the table of loads, one a point."""
    for point in result["points"]:
        if point["load"] != BURST:
            alone, served = point.get("engine", {}), point.get("server", {})
            told = served.get("forwards_per_token")
            both = "tokens_per_s" in alone and "tokens_per_s" in served
            named = f"{point['count']} in flight" if point["load"] == CLOSED else f"{point['rate']:.2f} a second"
            yield [
                named, point["eviction"], f"{point['per_forward']:g}", f"{point['requests']}",
                *(f"{some['tokens_per_s']:,.0f}" if "tokens_per_s" in some else "" for some in (alone, served)),
                f"{served['tokens_per_s'] / alone['tokens_per_s']:.3f}" if both else "",
                *(", ".join(f"{ms:,.1f}" for ms in served.get(f"{name}_ms", ())) for name in _TIMES),
                f"{1 / told:.2f}" if told else "", f"{served.get('failed', '')}", f"{alone.get('new_sizes', '')}",
            ]  # fmt: skip


def at_once_rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows of the table of requests at once."""
    for point in result["points"]:
        if point["load"] == BURST:
            floor, found = point["floor_s"], [f"{point['floor_s']:.2f}"]
            for some in (point.get("engine", {}), point.get("server", {})):
                first = some.get("first_s")
                found += ["", ""] if first is None else [f"{first:.2f}", f"{first / floor:.2f}"]
            yield [f"{point['count']}", *found]


def section(results: Sequence[Mapping[str, Any]]) -> str:
    """The tables of all runs."""
    parts = []
    for result in results:
        titled = f"**{result['model']}, prompts of {result['prompt']:,} tokens, answers of {result['answer']:,}**"
        rows, at_once = [*rows_of(result)], [*at_once_rows(result)]
        tables = [table(HEADER, rows)] * bool(rows) + [table(AT_ONCE, at_once)] * bool(at_once)
        parts.append("\n\n".join((titled, *tables, source_line(dict(result)))))
    return "\n\n".join(parts)


# --- the run --------------------------------------------------------------------------------------------------------------


def run(name: str, asked: Any, clock: Clock, folder: Path) -> dict[str, Any]:
    """Measure a model, and record it after each point."""
    result: dict[str, Any] = {"environment": environment(METHOD), "model": name, "device": asked.device, "card": None}
    result |= {
        "block": asked.block,
        "prompt": asked.prompt,
        "answer": asked.answer,
        "rounds": asked.rounds,
        "points": [],
    }
    sources.also(ROOT.glob("mosaic/serving/*.py"))
    model = with_block(name, asked.block, asked.layers)
    served, log = folder / "model", folder / "log"
    served.mkdir()
    (served / "config.json").write_text(json.dumps(dict(model.config)))

    def keep() -> None:
        write(f"over-http-{name}-{asked.device}{tag_of(asked)}", result)

    points, traces = loops(asked), list[list[str]]()
    for number, point in enumerate(points):
        files = {folder / f"{number}-{counted}": counted for counted in (False, True)}
        traces.append([str(written(file, point, asked, model, counted=counted)) for file, counted in files.items()])
    asks = [{**point, "traces": made} for point, made in zip(points, traces, strict=True)]
    for found in engine_alone(served, asks, asked, ENGINE * clock.left_s / 60):
        if "card" in found:
            result["card"] = found["card"]
            continue
        point = points[len(result["points"])] | {"engine": found}
        if point["load"] == BURST:
            point["floor_s"] = floor_s(model, asked.device, asked)
        result["points"].append(point)
        keep()
        print(f"the engine alone: {len(result['points'])} of {len(points)} points", flush=True)
    if not result["points"]:
        raise SystemExit("the engine alone has no point: see above for why.")
    with server(served, name, asked, log) as url:
        for number, point in enumerate(clock.while_left([*result["points"]], print)):
            point["server"] = over_http({**point, "traces": traces[number]}, url, name, log)
            keep()
            print(
                *(" | ".join(row) for rows in (rows_of, at_once_rows) for row in rows({"points": [point]})), flush=True
            )
        for point in clock.while_left(arrivals(result["points"], asked), print):
            trace = written(folder / "poisson", point, asked, model)
            result["points"].append({**point, "server": over_http({**point, "traces": [str(trace)]}, url, name, log)})
            keep()
    return result


def arrivals(points: Sequence[Mapping[str, Any]], asked: Any) -> list[dict[str, Any]]:
    """The points at a share of the most requests per second, of each way of closed loops."""
    found: dict[tuple[str, float], dict[str, Any]] = {}
    for point in points:
        rate = asked.poisson * point.get("server", {}).get("requests_per_s", 0.0)
        way = point["eviction"], point["per_forward"]
        if point["load"] == CLOSED and rate > found.get(way, {"rate": 0.0})["rate"]:
            found[way] = {**dict(zip(("eviction", "per_forward"), way, strict=True)), "load": POISSON, "rate": rate}
    requests = max(LEAST, asked.rounds * max(asked.counts))
    return [{**point, "count": None, "requests": requests} for point in found.values()]


def main(arguments: Sequence[str]) -> None:
    """Measure models, and record the figures of each."""
    parser = options(__doc__)
    parser.add_argument(
        "--traffic", choices=LENGTHS, default="short", help="512 tokens in and 256 out, or 4,096 and 1,536"
    )
    parser.add_argument("--prompt", type=int, help="tokens of each prompt, instead of the traffic's")
    parser.add_argument("--answer", type=int, help="tokens of each answer, instead of the traffic's")
    parser.add_argument("--counts", type=token_counts, default=(1, 8, 32, 64, 128), help="requests in flight")
    parser.add_argument(
        "--rounds", type=int, default=2, help=f"requests of a point for each in flight, {LEAST} in all at least"
    )
    parser.add_argument("--per-forward", type=parse_ratio, default=(2.0,), help="tokens of a request's step")
    parser.add_argument("--eviction", choices=EVICTION, default="off", help="what all requests ask for")
    parser.add_argument("--poisson", type=float, default=0.0, help="share of the most requests per second; 0: none")
    parser.add_argument("--burst", type=int, default=0, help="requests at once; 0: none")
    parser.add_argument("--block", type=int, default=32, help="tokens of a block")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    asked = parser.parse_args(arguments)
    prompt, answer = LENGTHS[asked.traffic]
    asked.prompt, asked.answer = asked.prompt or prompt, asked.answer or answer
    clock = Clock.start(asked.minutes)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    for name in asked.models:
        with TemporaryDirectory() as folder:
            print(section([run(name, asked, clock, Path(folder))]))


if __name__ == "__main__":
    main(sys.argv[1:])
