"""Token eviction by traces: tokens per second of block diffusion by batch and block, whole blocks beside frozen and evicted tokens.

    python -m benchmarks.eviction sdar-8b --device h200 --block 32 --batch 1,64,256

writes `eviction-<model>-<device>.json`. Weights are random; how many tokens steps decide and keep comes from a trace
(`benchmarks.traces`): of the paper, or of a file that `--trace` names. Sessions decode as they always do; only the prefill is left
out, and the keys in the state are random. Prompts have 256 to 1,024 tokens, answers are up to 2,048 tokens along, evenly; requests
are spread over a block, so steps are alike. Ways: `whole`, all tokens of a block in each step; `dc+`, those that are not frozen;
`focus` and `focus, dc+`, what the trace keeps of these; `all kept`, an eviction that drops nothing: beside `dc+` it shows what
metric, selection, compaction and the wait between the graphs take. A finished block's keys are computed once more from all of its
tokens (`block_commit="exact"`, the default); `focus, dc+, cached` and `dc+, cached` keep those that its steps have left.

Tokens per second are all tokens decided over the whole time of the steps that are timed, none left out. A size of a step that none
had before is planned and captured, which a server does once: steps that are not counted come first, until as many as are timed have
met no such size. A point says how many were still met while it was timed.

    python -m benchmarks.eviction sdar-8b --device h200 --batch 24 --prompts 32448,32448 --answer 0 --attention mage:k=1024

lets all ways attend so. A request of Fast-dLLM v2 has one more step a block, which commits it and decides the first token of
the next one: shared with others, or with sparse attention or eviction by itself, counted with those of the others. On a card every
point also has the milliseconds of a step's kernels by what they do. A point has what its launches of a kind take alone
(`benchmarks.step_parts`), with nothing else on the device. The table has the median step over
products, attention and selection together. Less than one cannot be: the command fails then, once it has written its results.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple
from weakref import WeakSet

import torch
from torch.profiler import ProfilerActivity, profile

import mosaic
from benchmarks.bench.meters import synchronise
from benchmarks.block import fill, with_block
from benchmarks.cases import Clock, device_of, options, tag_of, token_counts
from benchmarks.floor import Floor, keys_read
from benchmarks.record import environment, table, write
from benchmarks.step_kernels import KINDS, OTHERS, kernel_ms
from benchmarks.step_parts import alone_ms, launches_of
from benchmarks.traces import (
    EVICTION,
    Attending,
    Counted,
    Replay,
    Sizes,
    Trace,
    flat_importance,
    load_trace,
    paper_trace,
)
from mosaic.decoding import GenerationConfig, Session, Submission
from mosaic.decoding.config import ALGORITHMS, own_algorithm
from mosaic.errors import DoesNotFit
from mosaic.models.architecture import Architecture
from mosaic.models.policies.flashblock import Reused
from mosaic.models.policies.mage import Selected
from mosaic.runtime.compiled import CompiledModel

__all__ = ["HEADER", "WAYS", "NewSizes", "floor_of", "header_of", "main", "measured", "of_parts", "rows_of", "timings"]

HEADER = (
    "block", "requests", "way", "tokens/s", "a step, ms", "kept rows", "floor, ms", "of it", "of whole blocks", "floors allow",
    "eviction itself", "kernels: products, attention, selection, others, ms",
)  # fmt: skip
WHOLE, FROZEN, ALL_KEPT = "whole", "dc+", "all kept"
_FROZEN: Final[Mapping[str, Any]] = {"block_cache": "dc+"}
_CACHED: Final[Mapping[str, Any]] = {**_FROZEN, "block_commit": "cached"}
WAYS: Final[Mapping[str, Mapping[str, Any]]] = {
    WHOLE: {}, FROZEN: _FROZEN, "focus": {"eviction": EVICTION}, "focus, dc+": {"eviction": EVICTION, **_FROZEN},
    ALL_KEPT: {"eviction": EVICTION, **_FROZEN}, "dc+, cached": _CACHED, "focus, dc+, cached": {"eviction": EVICTION, **_CACHED},
}  # fmt: skip
PROMPTS: Final = (256, 1024)
ANSWER: Final = 2048
LEAST, WARM, TIMED = 17, 72, 24
"""Steps before any is timed, at least and at most, and that are timed, of many requests; fewer run through two blocks more."""
SPREAD: Final = 4096
"""More steps that may come before, by the number of requests, as sizes of a step vary more with few: up to `MOST`."""
MOST: Final = 512
METHOD: Final = (
    "tokens per second are all tokens decided over the whole time of the steps that are timed, none left out; a step is their "
    "median; before come steps that are not counted, until as many as are timed met no new size"
)
PROFILED, PARTED = 4, 3
"""Steps whose kernels are profiled, and whose parts are run alone."""
RARELY: Final = (100_000, 50, 50)
OF_PARTS: Final = 0.97
"""A step takes no less of its products, attention and selection, but for the spread of both."""
AT_LEAST: Final = 0.9
"""Share of the requests that have had a step when one of all requests is over."""
CASE: Final = ("block", "requests")
PARTS: Final = ("alone: products, attention, selection, others, ms", "step / the first three")
"""More of the table, of runs whose steps were also run in parts."""


def measured(
    model: CompiledModel, way: str, trace: Trace, *, requests: int, prompts: tuple[int, int] = PROMPTS, answer: int = ANSWER,
    attention: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Milliseconds and tokens decided of the steps of some blocks, in the middle of a generation, and the sizes of these steps."""
    replay = Replay(trace, requests, all_kept=way == ALL_KEPT)
    blocks = int(2 * trace.steps / requests)  # which few requests are to run through, as theirs are not spread over one
    count, most = TIMED + blocks, WARM + blocks + min(SPREAD // requests, MOST)
    arch, runner = model.architecture, Counted(model)
    with Session(runner) as session:
        config = _config(model, way, replay, most + count + PROFILED + PARTED, attention)
        place = replay.place if _is_replayed(arch, way) else partial(_evenly, arch.block, requests)
        session.submit_all([*_submissions(model, config, requests, prompts, answer, place)])
        session.advance()
        fill(model)
        gc.collect()
        often = gc.get_threshold()
        gc.freeze()  # as a server would: collecting what was made before takes some milliseconds of every step,
        gc.set_threshold(*RARELY)  # and looking for cycles a seventh of the host's time
        new = NewSizes(model)
        warm = warmed(
            partial(_round, session, replay, requests), new.count, least=blocks + LEAST, most=most, quiet=count
        )
        runner.sizes, replay.kept, replay.unembedded = [], 0, 0
        timed = [_round(session, replay, requests) for _ in range(count)]
        new_sizes = new.count()
        sizes, steps = runner.sizes, len(runner.sizes) / len(timed)
        tokens = steps * statistics.mean(step.tokens for step in sizes)
        keys = [steps * read / len(sizes) for read in _keys_read(sizes, arch)]
        if _is_replayed(arch, way):
            kept, rows = replay.kept / len(timed), replay.unembedded / len(timed)
        else:  # all rows of a block are unembedded, decided or not
            kept, rows = tokens, requests * trace.mean[0]
        kernels = _kernels(session, replay, requests) if model.asynchronous else {}
        parts = _parts(model, session, runner, replay, requests)  # which is the end of the session
        gc.set_threshold(*often)
        gc.unfreeze()
    times = [one.step_ms for one in timed]
    decided = sum(one.decided for one in timed)
    return {
        "tokens_per_s": 1e3 * decided / sum(times), "step_ms": statistics.median(times), "least_ms": min(times),
        "most_ms": max(times), "steps": count, "decided": decided / count, "warm_steps": warm, "new_sizes": new_sizes,
        "tokens": tokens, "rows": rows, "kept": kept, "keys": keys, "steps_of_all": steps, "kernels_ms": kernels, "parts_ms": parts,
    }  # fmt: skip


def warmed(step: Callable[[], object], new_sizes: Callable[[], int], *, least: int, most: int, quiet: int) -> int:
    """Run steps until `quiet` in a row have met no new size, at least and at most so many; return how many."""
    steps = since = 0
    while steps < least or (steps < most and since < quiet):
        step()
        steps, since = steps + 1, 0 if new_sizes() else since + 1
    return steps


class NewSizes:
    """Tells sizes of steps that a model has planned and bound since it was asked last."""

    def __init__(self, model: CompiledModel) -> None:
        self._model = model
        self._known = WeakSet(model.executors)

    def count(self) -> int:
        """Return how many there are; they are known then."""
        found = [executor for executor in self._model.executors if executor not in self._known]
        self._known.update(found)
        return len(found)


class _Round(NamedTuple):
    """One step of all requests: what it took, what of that the replay did, and tokens decided."""

    ms: float
    replay_ms: float
    decided: int

    @property
    def step_ms(self) -> float:
        """Without what the replay takes."""
        return self.ms - self.replay_ms


def _round(session: Session, replay: Replay, requests: int) -> _Round:
    own, began, done = replay.seconds, time.perf_counter(), session.advance()
    while len(done) < requests * AT_LEAST:  # another group
        done += session.advance()
    seconds = time.perf_counter() - began
    return _Round(1e3 * seconds, 1e3 * (replay.seconds - own), sum([len(step.positions) for step in done]))


def _kernels(session: Session, replay: Replay, requests: int) -> dict[str, float]:
    """Milliseconds of a step's kernels, by kind."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED):
            _round(session, replay, requests)
        torch.cuda.synchronize()
    launches = [(event.name, event.device_time) for event in profiled.events() if event.device_type.name == "CUDA"]
    return kernel_ms(launches, PROFILED)


def _parts(
    model: CompiledModel, session: Session, runner: Counted, replay: Replay, requests: int
) -> dict[str, float]:  # fmt: skip
    """Milliseconds of a step's launches by kind, those of a kind alone.

    Steps are run once more for it, and what that leaves in the states is of no use to the requests: the session ends with it.
    """
    found = list[dict[str, float]]()
    for _ in range(PARTED):
        before = len(runner.sizes)
        _round(session, replay, requests)
        asked = [*runner.last][before - len(runner.sizes) :]
        synchronise(model.asynchronous)
        parts = dict.fromkeys(KINDS, 0.0)
        for some in asked:
            for kind, launches in launches_of(model, some).items():
                parts[kind] += alone_ms(launches, on_card=model.asynchronous)
        found.append(parts)
    if model.asynchronous:
        torch.cuda.empty_cache()  # which the next plans may need
    return {kind: statistics.mean(parts[kind] for parts in found) for kind in KINDS}


def _config(model: CompiledModel, way: str, replay: Replay, steps: int, attention: str | None) -> GenerationConfig:
    """Options that last so many steps, by the trace where steps are not whole."""
    arch = model.architecture
    length = (replay.trace.most_blocks(steps) + 2) * arch.block
    wanted = {"steps": round(replay.trace.steps), "small_block_length": arch.block, **WAYS[way]}
    taken = {option: value for option, value in wanted.items() if option in ALGORITHMS[own_algorithm(arch)].options}
    config = GenerationConfig(gen_length=length, stop_at_eos=False, attention=attention, **taken)
    return replay.options(config, arch) if _is_replayed(arch, way) else config


def _is_replayed(arch: Architecture, way: str) -> bool:
    """Whether steps go by the trace one by one: whole blocks do not where a number of steps can be asked for."""
    return way != WHOLE or "steps" not in ALGORITHMS[own_algorithm(arch)].options


def _evenly(block: int, requests: int, number: int) -> int:
    """Known tokens of a request's first block: as many as any."""
    return number * block // requests


def _submissions(
    model: CompiledModel, config: GenerationConfig, requests: int, prompts: tuple[int, int], answer: int,
    place: Callable[[int], int],
) -> Iterator[Submission]:  # fmt: skip
    """Requests whose prompts and answers so far are as long as any; `place` says how many tokens their first blocks know."""
    arch, block = model.architecture, model.architecture.block
    for number in range(requests):
        low, high = prompts
        so_far = low + (high - low) * number // max(requests - 1, 1) + answer * (number * 7 % requests) // requests
        # where rows predict what follows them, a prompt of whole blocks is run
        known = max(place(number), int(arch.shifted))
        ids = torch.arange(so_far // block * block + known) % arch.mask_token_id
        yield Submission(prompt=ids, config=config, request_id=number)


def _keys_read(sizes: Sequence[Sizes], arch: Architecture) -> list[float]:
    """Keys that each layer reads in so many steps, by what each request does in them."""
    read = [_read_by(some, arch, keys) for step in sizes for some in step.attending for keys in some.keys]
    return [sum(layer) for layer in zip(*read, strict=True)]


def _read_by(some: Attending, arch: Architecture, keys: int) -> list[float]:
    """Keys that each layer reads for a request that sees so many."""
    cache = some.phase.cache
    policy = cache.attention if isinstance(cache, Selected) else cache.reuse if isinstance(cache, Reused) else None
    return keys_read(policy, arch, keys, selects=some.selects, refreshes=some.refreshes)


def floor_of(result: Mapping[str, Any], point: Mapping[str, Any]) -> float:
    """Return the seconds of a point's floor, by the sizes of its steps."""
    arch = with_block(result["model"], point["block"], result.get("layers")).architecture
    cut = 1 if "eviction" in WAYS[point["way"]] else None
    sizes = {size: point[size] for size in ("requests", "tokens", "kept", "rows", "keys")}
    return Floor(arch, device_of(result)).of(**sizes, cut=cut)


def _speed(point: Mapping[str, Any]) -> tuple[float, float]:
    """Tokens per second of all steps that were timed, and the median step in milliseconds."""
    times = point["step_ms"]
    if isinstance(times, list):  # as older records have them
        return 1e3 * sum(point["decided"]) / sum(times), statistics.median(times)
    return point["tokens_per_s"], times


def of_parts(point: Mapping[str, Any]) -> float | None:
    """Return the median step over what its products, attention and selection take alone, if that was measured."""
    parts = point.get("parts_ms")
    return _speed(point)[1] / (sum(parts.values()) - parts[OTHERS]) if parts else None


def less_than_parts(result: Mapping[str, Any]) -> list[str]:
    """Name the points whose step takes less than its products, attention and selection, each captured and timed alone."""
    ratios = [(point, of_parts(point)) for point in result["points"]]
    return [f"{point['requests']} requests, {point['way']}: {of:.2f}" for point, of in ratios if of and of < OF_PARTS]


def timings(result: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Yield each timing's name, its seconds, and its floor."""
    for point in result["points"]:
        name = f"{point['block']}, {point['requests']}, {point['way']}"
        yield name, _speed(point)[1] / 1e3, floor_of(result, point)


def header_of(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns of a run's table."""
    return (*HEADER, *PARTS) if any(point.get("parts_ms") for point in result["points"]) else HEADER


def rows_of(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows for a table, one a point."""
    more = len(header_of(result)) - len(HEADER)
    points = {(*(point[name] for name in CASE), point["way"]): point for point in result["points"]}
    floors = {key: floor_of(result, point) for key, point in points.items()}
    for (*case, way), point in points.items():
        (speed, step), floor = _speed(point), floors[*case, way]
        whole, frozen, kept = (points.get((*case, name)) for name in (WHOLE, FROZEN, ALL_KEPT))
        gained = "" if whole is None else f"{speed / _speed(whole)[0]:.2f}"
        allowed = "" if whole is None else f"{floors[*case, WHOLE] / floor:.2f}"
        itself = ""
        if frozen is not None and kept is not None and "focus" in way:
            extra = _speed(kept)[1] - _speed(frozen)[1]
            itself = f"{extra:.2f} ms, {extra / step:.1%}"
        named = (
            f"{way}, cached" if "commit" not in result and "block_cache" in WAYS[way] else way
        )  # before it was the default
        yield [
            f"{case[0]}", f"{case[1]}", named, f"{speed:,.0f}", f"{step:.2f}", f"{point['kept']:,.0f} of {point['tokens']:,.0f}",
            f"{1e3 * floor:.2f}", f"{step / (1e3 * floor):.2f}", gained, allowed, itself,
            ", ".join(f"{ms:.1f}" for ms in point.get("kernels_ms", {}).values()),
            *([_alone(point), f"{of_parts(point):.2f}"] if point.get("parts_ms") else [""] * more),
        ]  # fmt: skip


def _alone(point: Mapping[str, Any]) -> str:
    return ", ".join(f"{ms:.2f}" for ms in point["parts_ms"].values())


def main(arguments: Sequence[str]) -> None:
    """Measure models, and record the figures of each."""
    parser = options(__doc__)
    parser.add_argument("--batch", type=token_counts, default=(1, 64, 256), help="requests")
    parser.add_argument("--block", type=token_counts, default=(32,), help="tokens of a block")
    parser.add_argument("--ways", default=";".join(WAYS), help="separated by semicolons")
    parser.add_argument("--trace", type=Path, help="a file of a trace; the paper's averages if not given")
    parser.add_argument("--prompts", type=token_counts, default=PROMPTS, help="the shortest and the longest prompt")
    parser.add_argument("--answer", type=int, default=ANSWER, help="tokens of an answer")
    parser.add_argument("--attention", help="how all ways attend, as in `mosaic plan`; to all keys if not given")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    asked = parser.parse_args(arguments)
    on_card, clock, impossible = asked.device != "cpu", Clock.start(asked.minutes), list[str]()
    for name in asked.models:
        result: dict[str, Any] = {
            "environment": environment(METHOD, data=[asked.trace] if asked.trace else []),
            "model": name,
            "device": asked.device,
        }
        result |= {"commit": "exact", "layers": asked.layers, "prompts": asked.prompts, "answer": asked.answer}
        result |= {"card": torch.cuda.get_device_name() if on_card else "cpu", "points": []}
        for block in asked.block:
            described = with_block(name, block, asked.layers)
            trace = load_trace(asked.trace) if asked.trace else paper_trace(described.family, block)
            result |= {"trace": trace.name, "attention": asked.attention or "all keys"}
            with mosaic.compile(described, device=asked.device, seed=3) as model:
                flat_importance(model)
                for requests, way in clock.while_left([*product(asked.batch, asked.ways.split(";"))], print):
                    try:
                        found = measured(
                            model, way, trace, requests=requests, prompts=asked.prompts, answer=asked.answer,
                            attention=asked.attention,
                        )  # fmt: skip
                    except DoesNotFit as error:
                        print(requests, way, error)
                        continue
                    result["points"].append({"block": block, "requests": requests, "way": way, **found})
                    write(f"eviction-{name}-{asked.device}{tag_of(asked)}", result)
        print(table(header_of(result), list(rows_of(result))))
        impossible += [f"{name}, {point}" for point in less_than_parts(result)] if on_card else []
    if impossible:
        raise SystemExit(
            f"a step takes no less than its parts, so what was timed is something else: {'; '.join(impossible)}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
