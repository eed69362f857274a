"""Token eviction by traces: tokens per second of block diffusion by batch and block, whole blocks beside frozen and evicted tokens.

    python -m benchmarks.eviction sdar-8b --device h200 --block 32 --batch 1,64,256

writes `eviction-<model>-<device>.json`. Weights are random; how many tokens steps decide and keep comes from a trace
(`benchmarks.traces`): of the paper, or of a file that `--trace` names. Sessions decode as they always do; only the prefill is left
out, and the keys in the state are random. Prompts have 256 to 1,024 tokens, answers are up to 2,048 tokens along, evenly; requests
are spread over a block, so steps are alike. Ways: `whole`, all tokens of a block in each step, on the default path, where
tokens are on the device; `dc+`, those that are not frozen; `focus` and `focus, dc+`, what the trace keeps of these; `all kept`, an
eviction that drops nothing: beside `dc+` it shows what metric, selection, compaction and the wait between the graphs take.

    python -m benchmarks.eviction sdar-8b --device h200 --batch 24 --prompts 32448,32448 --answer 0 --attention mage:k=1024

lets all ways attend so. A request of Fast-dLLM v2 has one more step a block, which commits it and decides the first token of
the next one: shared with others, or with sparse attention or eviction by itself, counted with those of the others. On a card every
point also has the milliseconds of a step's kernels by what they do. Where the host knows a step's tokens, a point has what
its launches of a kind take alone (`benchmarks.step_parts`), and what a step takes relative to products, attention and
selection together.
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

import torch
from torch.profiler import ProfilerActivity, profile

import mosaic
from benchmarks.block import fill, with_block
from benchmarks.cases import Clock, options, tag_of, token_counts
from benchmarks.record import environment, table, write
from benchmarks.step_floor import StepFloor, keys_read
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
from mosaic.devices import load_device
from mosaic.errors import DoesNotFit
from mosaic.models.architecture import Architecture
from mosaic.models.parts.reused import Reused
from mosaic.models.parts.selected import Selected
from mosaic.runtime.compiled import CompiledModel

__all__ = ["HEADER", "WAYS", "header_of", "main", "measured", "rows_of"]

HEADER = (
    "block", "requests", "way", "tokens/s", "a step, ms", "kept rows", "floor, ms", "of it", "of whole blocks", "floors allow",
    "eviction itself", "kernels: products, attention, selection, others, ms",
)  # fmt: skip
WHOLE, FROZEN, ALL_KEPT = "whole", "dc+", "all kept"
_FROZEN: Final[Mapping[str, Any]] = {"block_cache": "dc+", "block_commit": "cached"}
WAYS: Final[Mapping[str, Mapping[str, Any]]] = {
    WHOLE: {}, FROZEN: _FROZEN, "focus": {"eviction": EVICTION}, "focus, dc+": {"eviction": EVICTION, **_FROZEN},
    ALL_KEPT: {"eviction": EVICTION, **_FROZEN},
}  # fmt: skip
PROMPTS: Final = (256, 1024)
ANSWER: Final = 2048
LEAST, WARM, TIMED = 17, 72, 24
"""Steps before any is timed, at least and at most, and that are timed, of many requests; fewer run through two blocks more.
After 17 it is little in doubt that a request which has never decided a whole block goes on."""
PROFILED, PARTED = 4, 3
"""Steps whose kernels are profiled, and whose parts are run alone."""
RARELY: Final = (100_000, 50, 50)
QUIET, STEADY = 16, 1.5
"""Steps of which none takes so many times their median: sizes that most steps have are planned and captured by then."""
SLOW: Final = 3.0
"""A step that takes so many times the median has met another one: it is not counted, as a server meets each once."""
AT_LEAST: Final = 0.9
"""Share of the requests that have had a step when one of all requests is over: crews are halves, and not quite equal."""
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
    arch, runner, warm = model.architecture, Counted(model), list[_Round]()
    with Session(runner) as session:
        config = _config(model, way, replay, WARM + TIMED + PROFILED + PARTED + 2 * blocks, attention)
        place = replay.place if _is_replayed(arch, way) else partial(_evenly, arch.block, requests)
        session.submit_all([*_submissions(model, config, requests, prompts, answer, place)])
        session.advance()
        fill(model)
        gc.collect()
        often = gc.get_threshold()
        gc.freeze()  # as a server would: collecting what was made before takes some milliseconds of every step,
        gc.set_threshold(*RARELY)  # and looking for cycles a seventh of the host's time
        while len(warm) < blocks + LEAST or (len(warm) < WARM + blocks and not _settled(warm)):
            warm.append(_round(session, replay, requests))
        runner.sizes, replay.kept, replay.unembedded = [], 0, 0
        timed = [_round(session, replay, requests) for _ in range(TIMED + blocks)]
        sizes, steps = runner.sizes, len(runner.sizes) / len(timed)
        if not _is_replayed(arch, way):  # of these some are launched in vain
            steps = round(steps)
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
    return {
        "warm_ms": [one.ms for one in warm], "step_ms": [one.step_ms(sizes) for one in timed],
        "decided": [one.decided for one in timed], "tokens": tokens, "rows": rows, "kept": kept, "keys": keys,
        "steps_of_all": steps, "kernels_ms": kernels, **parts,
    }  # fmt: skip


class _Round(NamedTuple):
    """One step of all requests, or one of each crew: what it took, what of that the replay did, and tokens decided."""

    ms: float
    replay_ms: float
    decided: int

    def step_ms(self, sizes: Sequence[Sizes]) -> float:
        """Without what the replay takes. While the device runs another crew that is hidden, or not: it counts there."""
        return self.ms - (0 if any(step.overlapped for step in sizes) else self.replay_ms)


def _round(session: Session, replay: Replay, requests: int) -> _Round:
    own, began, done = replay.seconds, time.perf_counter(), session.advance()
    while len(done) < requests * AT_LEAST:  # the other crew
        done += session.advance()
    seconds = time.perf_counter() - began
    return _Round(1e3 * seconds, 1e3 * (replay.seconds - own), sum([len(step.positions) for step in done]))


def _settled(rounds: Sequence[_Round]) -> bool:
    """Whether the last ones took about as long: a size that none had before is planned and captured, which takes longer."""
    last = [one.ms for one in rounds[-QUIET:]]
    return max(last) <= STEADY * statistics.median(last)


def _kernels(session: Session, replay: Replay, requests: int) -> dict[str, float]:
    """Milliseconds of a step's kernels, by kind."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED):
            _round(session, replay, requests)
        torch.cuda.synchronize()
    launches = [(event.name, event.device_time) for event in profiled.events() if event.device_type.name == "CUDA"]
    return kernel_ms(launches, PROFILED)


def _parts(model: CompiledModel, session: Session, runner: Counted, replay: Replay, requests: int) -> dict[str, Any]:
    """Milliseconds of a step's launches by kind, those of a kind alone, and what steps take relative to all kinds but the rest.

    Nothing where the device alone knows a step's tokens. Steps are run once more for it, and what that leaves in the states is
    of no use to the requests: the session ends with it.
    """
    found, ratios = list[dict[str, float]](), list[float]()
    for _ in range(PARTED):
        before = len(runner.sizes)
        one = _round(session, replay, requests)
        sizes, asked = runner.sizes[before:], [*runner.last][before - len(runner.sizes) :]
        if any(some[0].phase.tokens.computes for some in asked):
            return {}
        parts = dict.fromkeys(KINDS, 0.0)
        for some in asked:
            for kind, launches in launches_of(model, some).items():
                parts[kind] += alone_ms(launches, on_card=model.asynchronous)
        found.append(parts)
        ratios.append(one.step_ms(sizes) / (sum(parts.values()) - parts[OTHERS]))
    if model.asynchronous:
        torch.cuda.empty_cache()  # which the next plans may need
    means = {kind: statistics.mean(parts[kind] for parts in found) for kind in KINDS}
    return {"parts_ms": means, "of_parts": statistics.median(ratios)}


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


def _steady(point: Mapping[str, Any]) -> tuple[float, float]:
    """Tokens per second, and the median step in milliseconds."""
    middle = statistics.median(point["step_ms"])
    steps = [(ms, n) for ms, n in zip(point["step_ms"], point["decided"], strict=True) if ms <= SLOW * middle]
    return 1e3 * sum(n for _, n in steps) / sum(ms for ms, _ in steps), middle


def header_of(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns of a run's table."""
    return (*HEADER, *PARTS) if any("parts_ms" in point for point in result["points"]) else HEADER


def rows_of(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows for a table, one a point."""
    more = len(header_of(result)) - len(HEADER)
    points = {(*(point[name] for name in CASE), point["way"]): point for point in result["points"]}
    for (*case, way), point in points.items():
        (speed, step), floor = _steady(point), 1e3 * point["floor_s"]
        whole, frozen, kept = (points.get((*case, name)) for name in (WHOLE, FROZEN, ALL_KEPT))
        gained = "" if whole is None else f"{speed / _steady(whole)[0]:.2f}"
        allowed = "" if whole is None else f"{whole['floor_s'] / point['floor_s']:.2f}"
        itself = ""
        if frozen is not None and kept is not None and "focus" in way:
            extra = _steady(kept)[1] - _steady(frozen)[1]
            itself = f"{extra:.2f} ms, {extra / step:.1%}"
        yield [
            f"{case[0]}", f"{case[1]}", way, f"{speed:,.0f}", f"{step:.2f}", f"{point['kept']:,.0f} of {point['tokens']:,.0f}",
            f"{floor:.2f}", f"{step / floor:.2f}", gained, allowed, itself,
            ", ".join(f"{ms:.1f}" for ms in point.get("kernels_ms", {}).values()),
            *([_alone(point), f"{point['of_parts']:.2f}"] if "parts_ms" in point else [""] * more),
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
    device, on_card, clock = load_device(asked.device), asked.device != "cpu", Clock.start(asked.minutes)
    for name in asked.models:
        result: dict[str, Any] = {"environment": environment(), "model": name, "prompts": asked.prompts}
        result |= {"answer": asked.answer, "card": torch.cuda.get_device_name() if on_card else "cpu", "points": []}
        for block in asked.block:
            described = with_block(name, block, asked.layers)
            trace = load_trace(asked.trace) if asked.trace else paper_trace(described.family, block)
            result |= {"trace": trace.name, "attention": asked.attention or "all keys"}
            floor = StepFloor(described.architecture, device)
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
                    cut = 1 if "eviction" in WAYS[way] else None
                    sizes = {size: found[size] for size in ("tokens", "kept", "rows", "keys")}
                    found["floor_s"] = floor.of(requests=requests, cut=cut, **sizes)
                    result["points"].append({"block": block, "requests": requests, "way": way, **found})
                    write(f"eviction-{name}-{asked.device}{tag_of(asked)}", result)
        print(table(header_of(result), list(rows_of(result))))


if __name__ == "__main__":
    main(sys.argv[1:])
