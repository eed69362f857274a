"""Token eviction by traces: tokens per second of block diffusion by batch and block, whole blocks beside frozen and evicted tokens.

    python -m benchmarks.eviction sdar-8b --device h200 --block 32 --batch 1,64,256

writes `eviction-<model>-<device>.json`. Weights are random; how many tokens steps decide and keep comes from a trace
(`benchmarks.traces`): of the paper, or of a file that `--trace` names. Sessions decode as they always do; only the prefill is left
out, and the keys in the state are random. Prompts have 256 to 1,024 tokens, answers are up to 2,048 tokens along, evenly; requests
are spread over a block, so steps are alike. Ways: `whole`, all tokens of a block in each step, on the default path, where
tokens are on the device; `dc+`, those that are not frozen; `focus` and `focus, dc+`, what the trace keeps of these; `all kept`, an
eviction that drops nothing: beside `dc+` it shows what metric, selection, compaction and the wait between the graphs take.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch

import mosaic
from benchmarks.block import fill, with_block
from benchmarks.cases import Clock, options, tag_of, token_counts
from benchmarks.record import environment, table, write
from benchmarks.step_floor import StepFloor
from benchmarks.traces import EVICTION, Counted, Replay, Trace, flat_importance, load_trace, paper_trace
from mosaic.decoding import GenerationConfig, Session, Submission
from mosaic.devices import load_device
from mosaic.errors import DoesNotFit
from mosaic.runtime.compiled import CompiledModel

__all__ = ["HEADER", "WAYS", "main", "measured", "rows_of"]

HEADER = (
    "block", "requests", "way", "tokens/s", "a step, ms", "kept rows", "floor, ms", "of it", "of whole blocks", "floors allow",
    "eviction itself",
)  # fmt: skip
WHOLE, FROZEN, ALL_KEPT = "whole", "dc+", "all kept"
_FROZEN: Final[Mapping[str, Any]] = {"block_cache": "dc+", "block_commit": "cached"}
WAYS: Final[Mapping[str, Mapping[str, Any]]] = {
    WHOLE: {}, FROZEN: _FROZEN, "focus": {"eviction": EVICTION}, "focus, dc+": {"eviction": EVICTION, **_FROZEN},
    ALL_KEPT: {"eviction": EVICTION, **_FROZEN},
}  # fmt: skip
PROMPTS: Final = (256, 1024)
ANSWER: Final = 2048
WARM, TIMED = 8, 16
"""Steps before any is timed, and that are timed, of many requests; fewer requests run through two blocks more."""
SLOW: Final = 3.0
"""A step that takes so many times the median has planned or captured a size that none had before: it is not counted."""
AT_LEAST: Final = 0.9
"""Share of the requests that have had a step when one of all requests is over: crews are halves, and not quite equal."""
CASE: Final = ("block", "requests")


def measured(
    model: CompiledModel, way: str, trace: Trace, *, requests: int, prompts: tuple[int, int] = PROMPTS, answer: int = ANSWER
) -> dict[str, Any]:  # fmt: skip
    """Milliseconds and tokens decided of the steps of some blocks, in the middle of a generation, and the sizes of these steps."""
    replay = Replay(trace, all_kept=way == ALL_KEPT)
    more = int(2 * trace.steps / requests)
    warm, timed = WARM + more, TIMED + more
    runner, times, decided = Counted(model), list[float](), list[int]()
    with Session(runner) as session:
        session.submit_all([*_submissions(model, way, replay, warm + timed, requests, prompts, answer)])
        session.advance()
        fill(model)
        session.advance(warm)
        runner.sizes, replay.computed, replay.kept, replay.undecided = [], 0, 0, 0
        for _ in range(timed):
            own, began, done = replay.seconds, time.perf_counter(), session.advance()
            while len(done) < requests * AT_LEAST:  # the other crew
                done += session.advance()
            seconds = time.perf_counter() - began
            crews = len(runner.sizes) > len(times) + 2
            # what the replay takes is hidden, or not, where the device runs another crew meanwhile: it counts there
            times.append(1e3 * (seconds - (0 if crews else replay.seconds - own)))
            decided.append(sum([len(step.positions) for step in done]))
    steps = round(len(runner.sizes) / timed)  # of all requests: one, or one of each crew; the last are launched ahead
    tokens, keys = (steps * statistics.mean(sizes) for sizes in zip(*runner.sizes, strict=True))
    if way == WHOLE:  # which unembeds all rows of a block, decided or not
        kept, rows = tokens, requests * trace.mean[0]
    else:
        kept, rows = replay.kept / timed, replay.undecided / timed
    return {
        "step_ms": times, "decided": decided, "tokens": tokens, "rows": rows, "kept": kept, "keys": keys,
        "steps_of_all": steps,
    }  # fmt: skip


def _submissions(
    model: CompiledModel, way: str, replay: Replay, steps: int, requests: int, prompts: tuple[int, int], answer: int
) -> Iterator[Submission]:
    """Requests whose prompts and answers so far are as long as any, and whose first blocks have as many known tokens as any."""
    arch, block = model.architecture, model.architecture.block
    blocks = int((steps + 1) / replay.trace.steps) + 3
    config = GenerationConfig(
        gen_length=blocks * block, steps=round(replay.trace.steps), stop_at_eos=False, **WAYS[way]
    )
    if way != WHOLE:
        config = replay.options(config, arch)
    for number in range(requests):
        low, high = prompts
        so_far = low + (high - low) * number // max(requests - 1, 1) + answer * (number * 7 % requests) // requests
        known = number * block // requests
        ids = torch.arange(so_far // block * block + known) % arch.mask_token_id
        yield Submission(prompt=ids, config=config, request_id=number)


def _steady(point: Mapping[str, Any]) -> tuple[float, float]:
    """Tokens per second, and the median step in milliseconds."""
    middle = statistics.median(point["step_ms"])
    steps = [(ms, n) for ms, n in zip(point["step_ms"], point["decided"], strict=True) if ms <= SLOW * middle]
    return 1e3 * sum(n for _, n in steps) / sum(ms for ms, _ in steps), middle


def rows_of(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows for a table, one a point."""
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
        ]  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Measure models, and record the figures of each."""
    parser = options(__doc__)
    parser.add_argument("--batch", type=token_counts, default=(1, 64, 256), help="requests")
    parser.add_argument("--block", type=token_counts, default=(32,), help="tokens of a block")
    parser.add_argument("--ways", default=";".join(WAYS), help="separated by semicolons")
    parser.add_argument("--trace", type=Path, help="a file of a trace; the paper's averages if not given")
    parser.add_argument("--prompts", type=token_counts, default=PROMPTS, help="the shortest and the longest prompt")
    parser.add_argument("--answer", type=int, default=ANSWER, help="tokens of an answer")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    asked = parser.parse_args(arguments)
    device, on_card, clock = load_device(asked.device), asked.device != "cpu", Clock.start(asked.minutes)
    for name in asked.models:
        result: dict[str, Any] = {"environment": environment(), "model": name, "prompts": asked.prompts}
        result |= {"answer": asked.answer, "card": torch.cuda.get_device_name() if on_card else "cpu", "points": []}
        for block in asked.block:
            described = with_block(name, block, asked.layers)
            trace = load_trace(asked.trace) if asked.trace else paper_trace(described.family, block)
            result["trace"] = trace.name
            floor = StepFloor(described.architecture, device)
            with mosaic.compile(described, device=asked.device, seed=3) as model:
                flat_importance(model)
                for requests, way in clock.while_left([*product(asked.batch, asked.ways.split(";"))], print):
                    try:
                        found = measured(
                            model, way, trace, requests=requests, prompts=asked.prompts, answer=asked.answer
                        )
                    except DoesNotFit as error:
                        print(requests, way, error)
                        continue
                    cut = 1 if "eviction" in WAYS[way] else None
                    sizes = {size: found[size] for size in ("tokens", "kept", "rows", "keys")}
                    found["floor_s"] = floor.of(requests=requests, cut=cut, **sizes)
                    result["points"].append({"block": block, "requests": requests, "way": way, **found})
                    write(f"eviction-{name}-{asked.device}{tag_of(asked)}", result)
        print(table(HEADER, list(rows_of(result))))


if __name__ == "__main__":
    main(sys.argv[1:])
