"""Sparse keys step by step: milliseconds and bytes of a Refresh and of Reuse, and of whole generations beside others.

    python -m benchmarks.sparse_keys llada-8b --device h200 --prompt 128k --answer 256 --budget 24GiB --host-budget 2GiB \
        --options '{"retention": 0.1}' '{"retention": 0.1, "delay": 1}'

writes `keys-<model>-<device>.json`. Weights are random, and each step decides one token. Ways: each of the options of `SparseKeys`,
`dense` (the whole canvas in each step) and `dual` (the dual cache), where they fit. A generation that is expected to take longer
than `--seconds` ends as soon as each of its kinds of step has been timed twice, and its seconds are those of all its steps at the
medians: the point says so (`whole` is false). The driver's counter is read at every change from one kind of step to another; what a
full step has mapped stays so. Floors are those of `benchmarks.floor`: there all weights are on the card, wherever plans have them.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle, product
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

import mosaic
from benchmarks.bench.baselines import Transformer
from benchmarks.bench.meters import card, driver_bytes, synchronise
from benchmarks.cases import Clock, cut, device_of, options, reaching, tag_of, token_counts
from benchmarks.dllm_serve.selection import OPTIONS
from benchmarks.dllm_serve.systems import BASELINES, Loops
from benchmarks.dllm_serve.trace import Asked
from benchmarks.floor import Floor
from benchmarks.record import environment, source_line, table, write
from benchmarks.served import Meter
from benchmarks.step_kernels import kernel_ms
from mosaic.decoding import GenerationConfig, Session
from mosaic.decoding.streaming import Step
from mosaic.errors import DoesNotFit, UsageError
from mosaic.models import load
from mosaic.models.phase import FULL_STEP
from mosaic.models.policies.sparse_keys import SparseKeys
from mosaic.planner import Plan
from mosaic.runtime.compiled import CompiledModel
from mosaic.units import format_bytes, parse_bytes

__all__ = ["HEADER", "kernels_of", "main", "measured", "rows_of", "section", "timings"]

HEADER = (
    "prompt", "budget", "way", "step", "times", "ms", "predicted ms", "floor, ms", "of it", "planned", "driver, most",
    "a generation, s", "predicted s", "kernels: products, attention, selection, others, ms",
)  # fmt: skip
BLOCK: Final = 32
DENSE, DUAL = "dense", "dual"
LOOPS: Final[Mapping[str, str | SparseKeys]] = {
    "fast-dllm": DUAL, "fast-dllm-packed": DUAL, "sparse-dllm": OPTIONS, "sparse-dllm-packed": OPTIONS,
}  # fmt: skip
"""Loops in plain PyTorch (`benchmarks.dllm_serve`), and what takes the same steps as each."""
TWICE: Final = 2
"""Times that each kind of step has been run when a generation that takes too long ends; the first one does not count."""
FULL: Final = ("full", "refresh", "refresh_later")
"""Kinds of step that compute the whole canvas."""
WARM, PROFILED = 3, 4
"""Steps after a Refresh that are not profiled, and that are."""
METHOD: Final = (
    "a step is the median of all of its kind but the first, in one generation after the first steps of another; a generation is "
    "timed whole, or added up from these where the table says so; kernels are profiled after all that is timed"
)


@dataclass(slots=True, kw_only=True)
class Kind:
    """The steps of one kind: seconds of each, their plan where they have one, and the bytes of the card and of the pages at each
    change to it."""

    plan: Plan | None = None
    seconds: list[float] = field(default_factory=list)
    driver_bytes: list[int] = field(default_factory=list)
    committed_bytes: list[int] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """Seconds of a step; the first one, which plans and captures, does not count if there are others."""
        return statistics.median(self.seconds[1:] or self.seconds)

    def document(self, times: int) -> dict[str, Any]:
        """What a record says."""
        plan, found = self.plan, {
            "times": times, "ms": 1e3 * self.median_s, "first_ms": 1e3 * self.seconds[0], "timed": len(self.seconds),
            "driver_bytes": self.driver_bytes,
        }  # fmt: skip
        return found if plan is None else {
            **found, "predicted_ms": plan.predicted_step_ms, "config": dict(plan.config), "planned_bytes": plan.total_bytes,
            "packed_bytes": plan.pools.get("state/packed", 0), "host_bytes": plan.document["host_bytes"],
            "declared_fixed_bytes": plan.components["context"] + plan.components["library"],
            "committed_bytes": self.committed_bytes,
        }  # fmt: skip


class Watch:
    """Steps of one request by kind, as they end."""

    def __init__(self, way: str | SparseKeys, *, shifted: bool) -> None:
        self.kinds: dict[str, Kind] = {}
        self._way, self._shifted = way, shifted
        self._block, self._last = -1, ""

    def advance(self, session: Session, model: CompiledModel) -> None:
        """Run a step, and note its time and, at a change, the bytes."""
        began, done = time.perf_counter(), session.advance()
        while not done:
            done = session.advance()
        seconds, step = time.perf_counter() - began, done[-1]
        name = self._name(step)
        kind = self.kinds.setdefault(name, Kind(plan=step.plan))
        kind.plan = step.plan
        kind.seconds.append(seconds)
        if name != self._last:
            committed = model.memory().committed
            kind.committed_bytes.append(sum(size for pool, size in committed.items() if pool != "host"))
            kind.driver_bytes += [used] if (used := driver_bytes(model.asynchronous)) is not None else []
        self._block, self._last = step.block, name

    def _name(self, step: Step) -> str:
        """The kind of a step, by its phase and its place in the block."""
        first = step.block != self._block
        if self._way == DENSE:
            return "full"
        if self._way == DUAL:
            return "full" if first else "later"
        if step.phase == "reuse" and first and self._shifted:
            return "reuse_first"
        if step.phase == "refresh" and not first and self._shifted and self._way.drift is not None:
            return "refresh_later"
        return step.phase if step.phase in ("refresh", "windowed", "reuse") else "full"


def _config(way: str | SparseKeys, answer: int, *, shifted: bool) -> GenerationConfig:
    """Options by which each step decides one token: on LLaDA as many steps as tokens, on Dream no token is confident enough."""
    one: dict[str, Any] = {"algorithm": "fast-dllm", "threshold": 1.0} if shifted else {"steps": answer}
    return GenerationConfig(
        gen_length=answer, block_length=BLOCK, stop_at_eos=False, cache=None if way == DENSE else way, **one
    )


def _before_others(way: str | SparseKeys) -> int:
    """The steps before all kinds of step have run, but for the first and those of Reuse."""
    if not isinstance(way, SparseKeys):
        return 0
    return BLOCK * way.interval + (way.drift is not None) if way.sided else way.delay


def _times(way: str | SparseKeys, answer: int, *, shifted: bool) -> dict[str, int]:
    """How often a generation takes each kind of step."""
    if isinstance(way, SparseKeys):
        return way.times(answer, BLOCK, shifted=shifted)
    return {"full": answer} if way == DENSE else {"full": answer // BLOCK, "later": answer - answer // BLOCK}


def _session(model: CompiledModel) -> Session:
    """A session whose steps are waited for one by one: steps of a table overlap, and a launch may wait for the step before."""
    return Session(Meter(model, tabled=False))


def measured(
    model: CompiledModel, way: str | SparseKeys, *, prompt: int, answer: int, seconds: float
) -> dict[str, Any]:
    """Return the steps of one generation by kind, and its seconds.

    Parameters
    ----------
    way
        "dense", "dual", or sparse keys.
    prompt, answer
        Tokens.
    seconds
        That a generation may take, by its steps so far; of a longer one, steps are timed.

    Raises
    ------
    DoesNotFit
        If it does not fit the model's budget.
    """
    arch, config = model.architecture, _config(way, answer, shifted=model.architecture.shifted)
    ids = torch.arange(prompt) % arch.mask_token_id
    times = _times(way, answer, shifted=arch.shifted)
    with _session(model) as session:
        session.submit(ids, config)  # which may move weights; and the first steps of a size are planned and captured
        session.advance(1 if way == DENSE else min(1 + WARM + _before_others(way), answer))
    watch = Watch(way, shifted=arch.shifted)
    with _session(model) as session:
        began = time.perf_counter()
        session.submit(ids, config)
        while session.live and not _enough(watch.kinds, times, seconds):
            watch.advance(session, model)
        took, whole = time.perf_counter() - began, not session.live
    kinds = watch.kinds
    counted = {name: len(kind.seconds) for name, kind in kinds.items()}
    left_out = isinstance(way, SparseKeys) and way.drift is not None
    assert not whole or left_out or counted == {name: count for name, count in times.items() if count}, (
        f"{counted}, not {times}"
    )
    plans = {name: kind.plan for name, kind in kinds.items() if kind.plan is not None}
    predicted_s = sum(times[name] * plan.predicted_step_ms for name, plan in plans.items()) / 1e3
    return {**_summed(kinds, times, took if whole else None), "predicted_s": predicted_s}


def measured_plainly(network: Transformer, loop: str, *, prompt: int, answer: int, seconds: float) -> dict[str, Any]:
    """Return the same of a published loop in plain PyTorch, as it is or with flash attention and the block's logits alone."""
    like, cuda = LOOPS[loop], network.embedding.is_cuda
    times, (*firsts, last) = _times(like, answer, shifted=False), _times(like, BLOCK, shifted=False)
    request, ids = Asked(0, 0.0, prompt, answer), torch.arange(prompt) % network.arch.mask_token_id
    system = BASELINES[loop](network, 1, 0, longest=request)
    system.submit(request, ids)
    for _ in range(len(firsts) + WARM):
        system.step()
    system.reset()
    system.submit(request, ids)
    kinds, began = dict[str, Kind](), time.perf_counter()
    for name in cycle((*firsts, *[last] * (BLOCK - len(firsts)))):
        if not system.is_busy or _enough(kinds, times, seconds):
            break
        before = time.perf_counter()
        system.step()
        synchronise(cuda)
        kind = kinds.setdefault(name, Kind())
        kind.seconds.append(time.perf_counter() - before)
        if len(kind.seconds) == 1 and (used := driver_bytes(cuda)) is not None:
            kind.driver_bytes.append(used)
    return _summed(kinds, times, None if system.is_busy else time.perf_counter() - began)


def _summed(kinds: Mapping[str, Kind], times: Mapping[str, int], took_s: float | None) -> dict[str, Any]:
    """What a record says of a generation; one that was not run whole is added up."""
    return {
        "steps": {name: kind.document(times[name]) for name, kind in kinds.items()},
        "whole": took_s is not None,
        "generation_s": _expected(kinds, times) if took_s is None else took_s,
        "steps_s": _expected(kinds, times),
    }


def _expected(kinds: Mapping[str, Kind], times: Mapping[str, int]) -> float:
    """Seconds of all steps of a generation, by the medians."""
    return sum(times[name] * kind.median_s for name, kind in kinds.items())


def _enough(kinds: Mapping[str, Kind], times: Mapping[str, int], seconds: float) -> bool:
    """Whether each kind of step has been timed, and all of them would take too long."""
    wanted = {name: min(TWICE, count) for name, count in times.items() if count}
    timed = all(name in kinds and len(kinds[name].seconds) >= count for name, count in wanted.items())
    return timed and _expected(kinds, times) > seconds


def kernels_of(model: CompiledModel, way: SparseKeys, *, prompt: int, answer: int) -> dict[str, dict[str, float]]:
    """Return milliseconds of kernels by kind, of a card's steps: of some of Reuse, and of the first of each other kind."""
    found: dict[str, dict[str, float]] = {}
    arch = model.architecture
    kinds = {**dict.fromkeys(("full", "refresh")[1 - way.delay :], (0, 1)), "reuse": (WARM, PROFILED)}
    if way.sample is not None and answer > BLOCK * way.interval:
        kinds["windowed"] = _before_others(way) - 1 - WARM - PROFILED, 1
    with _session(model) as session:
        session.submit(torch.arange(prompt) % arch.mask_token_id, _config(way, answer, shifted=arch.shifted))
        for name, (before, count) in kinds.items():
            session.advance(before)
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                session.advance(count)
                synchronise(model.asynchronous)
            events = [event for event in profiled.events() if event.device_type.name == "CUDA"]
            found[name] = kernel_ms([(event.name, event.device_time) for event in events], count)
    return found


def _floor_ms(result: Mapping[str, Any], point: Mapping[str, Any], step: str) -> float:
    """Milliseconds of the floor of one kind of step."""
    arch = cut(load(result["model"]), result["layers"]).architecture
    floor, length = Floor(arch, device_of(result)), point["prompt"] + point["answer"]
    if step in FULL:
        return 1e3 * floor.of(tokens=length, rows=BLOCK, keys=[float(length)] * arch.layers)
    keys, tokens = length, BLOCK + (step == "reuse_first")
    if point["options"] is not None:
        sizes = SparseKeys(**point["options"]).steps(FULL_STEP, length, BLOCK, answer=point["answer"])
        (keys,) = sizes["reuse"].keys
        if step == "windowed":
            (tokens,) = sizes[step].windows  # and those of its keys that are packed are counted twice
            keys += tokens
    return 1e3 * floor.of(tokens=tokens, rows=1, keys=[float(keys)] * arch.layers)  # whenever rows are decided


def timings(result: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Yield each timing's name, its seconds, and its floor."""
    for point in result["points"]:
        for step, found in point.get("steps", {}).items():
            yield (
                f"{point['prompt']:,}, {point['way']}, {step}",
                found["ms"] / 1e3,
                _floor_ms(result, point, step) / 1e3,
            )


def rows_of(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows for a table, one a kind of step."""
    for point in result["points"]:
        budget = format_bytes(point["budget_bytes"]) if point["budget_bytes"] else "all of it"
        case = [f"{point['prompt']:,}", budget, f"`{point['way']}`"]
        predicted_s = f"{point['predicted_s']:,.1f}" if "predicted_s" in point else ""
        if point["failed"]:
            yield [*case, point["failed"].split(". ")[0], *[""] * (len(HEADER) - len(case) - 1)]
        for number, (step, found) in enumerate(point.get("steps", {}).items()):
            floor, used = _floor_ms(result, point, step), found["driver_bytes"]
            all_of_it = f"{point['generation_s']:,.1f}{'' if point['whole'] else ', from its steps'}"
            yield [
                *case, step, f"{found['times']:,}", f"{found['ms']:,.2f}",
                f"{found['predicted_ms']:,.2f}" if "predicted_ms" in found else "", f"{floor:,.2f}",
                f"{found['ms'] / floor:.2f}", format_bytes(found["planned_bytes"]) if "planned_bytes" in found else "",
                format_bytes(max(used)) if used else "",
                *(("", "") if number else (all_of_it, predicted_s)),
                ", ".join(f"{ms:,.2f}" for ms in point.get("kernels_ms", {}).get(step, {}).values()),
            ]  # fmt: skip


def section(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a table per record."""
    return "\n\n".join(
        f"**{r['model']}, answers of {r['answer']:,} tokens**\n\n{table(HEADER, [*rows_of(r)])}\n\n{source_line(dict(r))}"
        for r in results
    )


def _point(model: CompiledModel, way: str | SparseKeys, *, prompt: int, answer: int, seconds: float) -> dict[str, Any]:
    """Measure one way; why it does not fit, under `failed`."""
    point: dict[str, Any] = {
        "prompt": prompt, "answer": answer, "budget_bytes": model.planner.budget_bytes, "way": str(way), "failed": None,
        "options": asdict(way) if isinstance(way, SparseKeys) else None,
    }  # fmt: skip
    try:
        return point | measured(model, way, prompt=prompt, answer=answer, seconds=seconds)
    except DoesNotFit as error:
        return point | {"failed": str(error)}


def _plain_point(loops: Loops, loop: str, *, prompt: int, answer: int, seconds: float) -> dict[str, Any]:
    """Measure a loop on all of the card; why it does not fit, under `failed`."""
    like = LOOPS[loop]
    point: dict[str, Any] = {
        "prompt": prompt, "answer": answer, "budget_bytes": None, "way": loop, "failed": None,
        "options": asdict(like) if isinstance(like, SparseKeys) else None,
    }  # fmt: skip
    torch.cuda.empty_cache()
    try:
        with torch.no_grad():
            return point | measured_plainly(loops.network, loop, prompt=prompt, answer=answer, seconds=seconds)
    except torch.OutOfMemoryError as error:
        return point | {"failed": str(error).splitlines()[0]}


def _sparse_keys(text: str) -> SparseKeys:
    """`{"retention": 0.1}` as options."""
    try:
        return SparseKeys(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise UsageError(f"--options are options of SparseKeys as JSON, got '{text}': {error}.") from None


def main(arguments: Sequence[str]) -> None:
    """Measure a model, and record its figures."""
    parser = options(__doc__)
    parser.add_argument("--prompt", type=token_counts, default=token_counts("128k"), help="tokens of prompts")
    parser.add_argument("--answer", type=int, default=256, help="tokens to generate, in blocks of 32")
    parser.add_argument("--budget", type=parse_bytes, default="24GiB", help="of the device")
    parser.add_argument("--options", nargs="+", default=["{}"], help="of sparse keys, as JSON")
    parser.add_argument(
        "--beside", default=f"{DENSE},{DUAL}", help=f"of dense, dual and {', '.join(LOOPS)}; or nothing"
    )
    parser.add_argument("--seconds", type=float, default=200.0, help="generations that take longer are not timed whole")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    asked = parser.parse_args(arguments)
    if len(asked.models) > 1:
        raise UsageError("one model a process: the profiler of the one before would count as memory of the next.")
    clock, on_card, name = Clock.start(asked.minutes), asked.device != "cpu", asked.models[0]
    beside = [*filter(None, asked.beside.split(","))]
    ways = [*map(_sparse_keys, asked.options), *(way for way in beside if way not in LOOPS)]
    plain = [way for way in beside if way in LOOPS]
    points = list[dict[str, Any]]()
    result: dict[str, Any] = {
        "environment": environment(METHOD), "model": name, "device": asked.device, "layers": asked.layers,
        "answer": asked.answer, "card": card(on_card), "points": points,
    }  # fmt: skip
    reached = reaching(cut(load(name), asked.layers), max(asked.prompt) + asked.answer)
    loops = Loops(reached, cuda=on_card, budget_bytes=None, seed=asked.seed) if plain else None
    with mosaic.compile(
        reached, device=asked.device, budget=asked.budget, host_budget=asked.host_budget,
        seed=asked.seed,
    ) as model:  # fmt: skip
        for way, prompt in clock.while_left([*product(ways, asked.prompt)], print):
            points.append(_point(model, way, prompt=prompt, answer=asked.answer, seconds=asked.seconds))
            write(f"keys-{name}-{asked.device}{tag_of(asked)}", result)
        for point in clock.while_left([point for point in points if on_card and _has_kernels(point)], print):
            way = SparseKeys(**point["options"])
            point["kernels_ms"] = kernels_of(model, way, prompt=point["prompt"], answer=asked.answer)
            write(f"keys-{name}-{asked.device}{tag_of(asked)}", result)
    for way, prompt in clock.while_left([*product(plain, asked.prompt)], print):
        assert loops is not None
        points.append(_plain_point(loops, way, prompt=prompt, answer=asked.answer, seconds=asked.seconds))
        write(f"keys-{name}-{asked.device}{tag_of(asked)}", result)
    print(table(HEADER, [*rows_of(result)]))


def _has_kernels(point: Mapping[str, Any]) -> bool:
    return point["options"] is not None and not point["failed"]


if __name__ == "__main__":
    main(sys.argv[1:])
