"""dLLM-Serve's experiments: the loops decide what Mosaic, or a plain statement, decides, in every arrangement of rows; points and
their records."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_runner import CompiledRunner
from sparse_keys_stated import Stated
from test_bench_loops import network_of
from test_decoding import CONFIGS, MASK, prompt_of
from torch import Tensor

from benchmarks import sparse_keys
from benchmarks.dllm_serve import __main__ as command
from benchmarks.dllm_serve import curves, dllm_cache, driving, padded, phases, selection, systems, tables
from benchmarks.dllm_serve.baselines import (
    Found,
    Scheduled,
    Static,
    System,
    packed_loop,
    padded_loop,
    pages_of,
    rows_of,
)
from benchmarks.dllm_serve.dllm_cache import Intervals
from benchmarks.dllm_serve.trace import KINDS, LONGEST, Asked, described, trace
from benchmarks.loops import PlainModel, generate_plainly
from mosaic import decoding
from mosaic.decoding import Submission
from mosaic.decoding.config import GenerationConfig, resolve
from mosaic.errors import DoesNotFit, UnknownName, UsageError
from mosaic.models import load

NETWORK, TENSORS = network_of("llada")
SIZES = [(9, 64), (41, 64), (23, 32)]
"""Tokens of prompts and answers; a padded batch has the first two."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tiny products wait for threads longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def requests_of(sizes: Sequence[tuple[int, int]]) -> Found:
    return [(Asked(number, 0.0, prompt, answer), prompt_of(prompt)) for number, (prompt, answer) in enumerate(sizes)]


def served(system: System, found: Found) -> dict[int, list[int]]:
    """Answers by number; each request decides a token a step."""
    answers = dict[int, list[int]]()
    for asked, prompt in found:
        system.submit(asked, prompt)
    while system.is_busy:
        answers |= {asked.number: answer.tolist() for asked, answer in system.step()}
    assert system.decided == sum(asked.answer for asked, _ in found) == sum(map(len, answers.values()))
    return answers


def arrangements(dual: bool, found: Found) -> dict[str, Callable[[], System]]:
    """Every arrangement of the rows of an algorithm.

    A scheduler's steps have room for the longest request beside one block: requests are in different phases.
    """
    loop, longest = padded.fast_dllm if dual else padded.sparse_dllm, max(asked.length for asked, _ in found)
    rows, pages = max(rows_of(asked, dual=dual) for asked, _ in found), max(pages_of(asked) for asked, _ in found)

    def steps(rows: int, *, published: bool = False) -> phases.PackedSteps:
        return phases.PackedSteps(NETWORK, phases.Pool.of(NETWORK, rows), 3, longest, published=published)

    every: dict[str, Callable[[], System]] = {
        "padded": lambda: Static(padded_loop(NETWORK, loop), 2),
        "packed": lambda: Static(packed_loop(steps(3 * rows), dual=dual), 3),
    }
    if not dual:
        every["scheduled"] = lambda: Scheduled(steps(3 * rows), longest + 32)
        every["scheduled, published"] = lambda: Scheduled(steps(2 * pages, published=True), longest + 32)
    return every


# --- what is decided --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cache", "sizes"),
    [
        pytest.param("dual", SIZES, marks=pytest.mark.soak),
        pytest.param(selection.OPTIONS, SIZES, marks=pytest.mark.soak),
        (selection.OPTIONS, [(17, 32), (9, 32)]),
    ],
)
def test_loops_decide_what_mosaic_decides(cache: Any, sizes: Sequence[tuple[int, int]]) -> None:
    """Fast-dLLM's dual cache; and Sparse-dLLM's and dLLM-Serve's readings of sparse keys, in batches and in mixed phases."""
    found, runner = requests_of(sizes), CompiledRunner(CONFIGS["llada"], TENSORS)
    options = {"block_length": 32, "stop_at_eos": False, "cache": cache}
    with decoding.Session(runner) as session:
        lives = session.submit_all(
            [
                Submission(
                    prompt=prompt, config=GenerationConfig(gen_length=asked.answer, steps=asked.answer, **options)
                )
                for asked, prompt in found
            ]
        )
        while session.live:
            session.advance()
    expected = {number: live.generation.token_ids.tolist() for number, live in enumerate(lives)}
    runner.close()
    assert len({token for answer in expected.values() for token in answer}) > 8
    for name, make in arrangements(cache == "dual", found).items():
        assert served(make(), found) == expected, name


def stated(prompt: Tensor, answer: int, intervals: Intervals) -> list[int]:
    """dLLM-Cache on one canvas in float64, row by row of what is kept."""
    net = Stated(SimpleNamespace(arch=NETWORK.arch, tensors=TENSORS))
    ids, first, kept = torch.cat([prompt, torch.full((answer,), MASK)]), len(prompt), [{} for _ in NETWORK.layers]
    open_, everything = torch.arange(len(ids)) >= first, torch.arange(len(ids))
    for step in range(answer):
        x = net.tensors[NETWORK.arch.names.embedding][ids]
        for layer, mine in enumerate(kept):
            name = {n: getattr(NETWORK.arch.names, n).format(layer=layer) for n in
                    ("attention_norm", "ffn_norm", "query", "key", "value", "output", "gate", "up", "down")}  # fmt: skip
            normed = net.norm(x, name["attention_norm"])
            q, k, v = (net.project(normed, name[part]) for part in ("query", "key", "value"))
            q, k = net.rotate(q, everything), net.rotate(k, everything)
            due = set(range(first)) if step % intervals.prompt == 0 else set()
            if step % intervals.answer == 0:
                due |= set(range(first, len(ids)))
            else:
                alike = F.cosine_similarity(v[first:].flatten(1), mine["v"][first:].flatten(1)).bfloat16().tolist()
                least = sorted(range(answer), key=lambda p: (alike[p], p))[: int(answer * intervals.share)]
                due |= {first + p for p in least}
            rows = torch.tensor(sorted(due))
            if not mine:
                mine |= {"k": k.clone(), "v": v.clone(), "a": torch.zeros_like(x), "f": torch.zeros_like(x)}
            mine["k"][rows], mine["v"][first:], mine["v"][rows] = k[rows], v[first:], v[rows]
            weights = torch.einsum("qhd,khd->hqk", q[rows], mine["k"]) / NETWORK.arch.attention.head_size**0.5
            seen = torch.einsum("hqk,khd->qhd", weights.softmax(-1), mine["v"])
            mine["a"][rows] = seen.flatten(1) @ net.tensors[name["output"]].T
            x = x + mine["a"]
            normed = net.norm(x[rows], name["ffn_norm"])
            gate, up = (normed @ net.tensors[name[part]].T for part in ("gate", "up"))
            mine["f"][rows] = (F.silu(gate) * up) @ net.tensors[name["down"]].T
            x = x + mine["f"]
        probability = (net.norm(x, NETWORK.arch.names.final_norm) @ net.tensors[NETWORK.arch.names.head].T).softmax(-1)
        block = everything < first + (step // 32 + 1) * 32
        best, token = probability.max(-1)
        row = int(best.masked_fill(~(open_ & block), -1.0).argmax())
        ids[row], open_[row] = token[row], False
    return ids[first:].tolist()


@pytest.mark.soak
@pytest.mark.parametrize("intervals", [Intervals(1, 1), Intervals(24, 7)])
def test_dllm_cache_decides_what_it_is_stated_to_decide(intervals: Intervals) -> None:
    """With rows of answers that are chosen, in steps with and without prompts; and where all is computed, as the plain loop."""
    found = requests_of(SIZES)
    if intervals.answer > 1:
        expected = {asked.number: stated(prompt, asked.answer, intervals) for asked, prompt in found}
    else:
        expected = {}
        for asked, prompt in found:
            config = resolve(
                GenerationConfig(gen_length=asked.answer, steps=asked.answer, block_length=32), NETWORK.arch
            )
            expected[asked.number] = generate_plainly(PlainModel(NETWORK), prompt, config).tolist()
    every = {
        "padded": Static(
            padded_loop(NETWORK, lambda network, batch: dllm_cache.dllm_cache(network, batch, intervals)), 2
        ),
        "packed": Static(lambda found: dllm_cache.dllm_cache_packed(NETWORK, found, intervals), 3),
    }
    for name, system in every.items():
        assert served(system, found) == expected, name


# --- who is served ----------------------------------------------------------------------------------------------------


class Idle(phases.PackedSteps):
    """Steps that compute nothing: requests and tokens of each are noted."""

    def __init__(self, rows: int, longest: int = 256) -> None:
        super().__init__(NETWORK, phases.Pool.of(NETWORK, rows), 24, longest)
        self.noted = list[list[tuple[int, int]]]()

    def step(self, lives: Sequence[phases.Live]) -> None:
        self.noted.append([(live.asked.number, live.tokens) for live in lives])
        for live in lives:
            live.steps += 1


def walked(found: Sequence[Asked], most: int) -> Iterator[dict[int, int]]:
    """dLLM-Serve's public scheduler, stated apart: running requests up to the first that does not fit, then newcomers, which stand
    before those that were left out."""
    running, waiting, taken, coming = list[Asked](), list[Asked](), Counter[int](), [*found]
    for step in count():
        while coming and coming[0].at_s <= step:
            waiting.append(coming.pop(0))
        if not running and not waiting:
            return
        chosen, costs = list[Asked](), dict[int, int]()
        for newcomers, queue in ((False, [*running]), (True, [*waiting])):
            for one in queue:
                cost = one.length if taken[one.number] % 32 < 2 else 32
                if sum(costs.values()) + cost > most:
                    break
                chosen.append(one)
                costs[one.number] = cost
                (waiting if newcomers else running).remove(one)
        taken.update(costs.keys())
        running = [one for one in chosen if taken[one.number] < one.answer] + running
        yield costs


def test_the_scheduler_walks_requests_as_stated() -> None:
    overtaken = 0
    for seed in range(4):
        rng = random.Random(seed)
        found, at_s = [], 0
        for asked, prompt in requests_of([(rng.randint(1, 160), 32 * rng.randint(1, 3)) for _ in range(24)]):
            found.append((asked._replace(at_s=at_s), prompt))
            at_s += rng.randint(0, 3)
        steps, most = Idle(rows=5000), rng.randint(400, 500)
        system = Scheduled(steps, most)
        coming = [*found]
        for step in count():
            while coming and coming[0][0].at_s <= step:
                system.submit(*coming.pop(0))
            if not system.is_busy:
                break
            system.step()
        assert steps.noted == [[*costs.items()] for costs in walked([asked for asked, _ in found], most)]
        assert max(sum(dict(tokens).values()) for tokens in steps.noted) <= most and steps.pool.runs == []
        overtaken += sum([*dict(tokens)] != sorted(dict(tokens)) for tokens in steps.noted)
    assert overtaken


def test_a_batch_is_the_largest_that_fits_and_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for a card of 100 GiB, of which 1 GiB is not PyTorch's: from 6 requests on a step runs out of memory."""
    said, tried = list[float](), list[int]()

    class Small(Idle):
        def step(self, lives: Sequence[phases.Live]) -> None:
            super().step(lives)
            tried.append(len(lives))
            if len(lives) > most and any(live.phase is phases.Phase.REUSE for live in lives):
                raise torch.OutOfMemoryError("out of memory")

    def build(network: Any, units: int, tokens: int) -> System:
        return Static(packed_loop(Small(units * 600, LONGEST.length), dual=False), units)

    most = 5
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", said.append)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 16 << 30)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(systems, "driver_bytes", lambda cuda: 17 << 30)
    monkeypatch.setitem(systems.BASELINES, "fast-dllm", build)
    loops = systems.Loops(load(CONFIGS["llada"]), cuda=False, budget_bytes=24 << 30, seed=0)
    assert loops.make("fast-dllm").units == 5 and {1, 2, 4, 8, 6, 5} == {*tried}
    assert said == [pytest.approx(0.97 * 0.23), pytest.approx(0.23)]
    loops.close()
    assert said[2:] == [1.0]
    most = 0
    with pytest.raises(DoesNotFit, match=r"fast-dllm: a request of 1,112 positions does not fit 24\.00 GiB"):
        loops.make("fast-dllm")


@pytest.mark.parametrize(
    "make", [lambda steps: Scheduled(steps, 200), lambda steps: Static(packed_loop(steps, dual=False), 2)]
)
def test_requests_that_are_forgotten_leave_nothing(make: Callable[[phases.PackedSteps], System]) -> None:
    steps = Idle(rows=300)
    system = make(steps)
    for _ in range(3):
        for asked, prompt in requests_of(SIZES):
            system.submit(asked, prompt)
        system.step()
        assert system.is_busy and len(steps.pool.runs) == 2
        system.reset()
        assert not system.is_busy and steps.pool.runs == []


# --- traffic and points -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_a_trace_is_the_same_for_all_and_as_its_kind_says(name: str) -> None:
    kind = KINDS[name]
    found = [*islice(trace(kind, 5), 4000)]
    assert found == [*islice(trace(kind, 5), 4000)] and described(kind, 5) != described(kind, 6)
    for ends, lengths in ((kind.prompts, [one.prompt for one in found]), (kind.answers, [one.answer for one in found])):
        assert ends[0] <= min(lengths) < 1.1 * ends[0] and 0.9 * ends[1] < max(lengths) <= ends[1]
    assert described(kind, 5)["mean_answer"] == pytest.approx(sum(one.answer for one in found) / 4000, rel=0.05)
    assert all(one.answer % 32 == 0 for one in found) and [one.number for one in found] == [*range(4000)]
    gaps = torch.tensor([one.at_s for one in found]).diff()
    assert gaps.mean() == pytest.approx(1.0, abs=0.1) and gaps.min() >= 0
    assert gaps.std() == pytest.approx(kind.shape**-0.5, rel=0.1)


class Fake:
    """Serves one request after the other, in steps of 5 ms by its own clock, but for one that never ends."""

    asynchronous = False

    def __init__(self, never: int) -> None:
        self.decided, self.waiting, self.never, self.now = 0, list[Asked](), never, 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 1e-9

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting)

    def submit(self, asked: Asked, prompt: Tensor) -> None:
        assert len(prompt) == asked.prompt
        self.waiting.append(asked)

    def reset(self) -> None:
        self.waiting.clear()

    def step(self) -> Found:
        self.sleep(5e-3)
        first = self.waiting.pop(0)
        if first.number == self.never:
            return []
        self.decided += first.answer
        return [(first, torch.zeros(first.answer))]


def test_latencies_are_of_requests_of_the_first_half_to_their_end_or_to_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests 0.1 s apart, for a second; the one that never ends has its age."""

    def driven(system: Fake, **more: Any) -> dict[str, Any]:
        monkeypatch.setattr(driving, "time", system)
        asked = (Asked(number, float(number), 3, 32) for number in count())
        return driving.driven(system, asked, NETWORK.arch, cuda=False, **more)

    found = driven(Fake(never=2), rate=10.0, seconds=0.99)
    assert (found["came"], found["ended"], found["tokens"], found["steps"]) == (10, 9, 9 * 32, 10)
    assert (found["counted"], found["unended"]) == (5, 1)
    expected = torch.tensor([5e-3, 5e-3, 0.79, 5e-3, 5e-3])
    assert found["latency_mean_s"] == pytest.approx(float(expected.mean()), abs=1e-5)
    assert found["latency_deviation_s"] == pytest.approx(float(expected.std(correction=0)), abs=1e-5)
    assert found["latency_most_s"] == pytest.approx(0.79, abs=1e-5) and found["latency_median_s"] < 5.1e-3
    assert found["latency_span_s"] == pytest.approx(0.785, abs=1e-5) and found["busy_s"] == pytest.approx(
        0.05, abs=1e-5
    )
    queued = driven(Fake(never=-1), rate=driving.QUEUED, seconds=0.3)
    assert queued["rate"] is None and queued["ended"] == 60 and queued["came"] == 59 + driving.BACKLOG
    assert queued["tokens_per_s"] == pytest.approx(32 * 200, rel=1e-5)


def test_steps_of_a_published_loop_are_told_apart_by_their_place_in_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first takes 3 ms, others 1 ms, by a clock of their own; beside the steps that warm the loop."""

    class Timed(Fake):
        def step(self) -> Found:
            self.sleep(3e-3 if self.decided % 32 == 0 else 1e-3)
            self.decided += 1
            self.waiting = [] if self.decided == 96 else self.waiting
            return []

        def reset(self) -> None:
            self.waiting, self.decided = [], 0

    system = Timed(never=-1)
    monkeypatch.setattr(sparse_keys, "time", system)
    monkeypatch.setitem(sparse_keys.BASELINES, "fast-dllm", lambda network, units, tokens, longest: system)
    found = sparse_keys.measured_plainly(NETWORK, "fast-dllm", prompt=9, answer=96, seconds=1.0)
    assert {name: (step["timed"], step["times"]) for name, step in found["steps"].items()} == {
        "full": (3, 3),
        "later": (93, 93),
    }
    assert [step["ms"] for step in found["steps"].values()] == pytest.approx([3, 1], abs=1e-3)
    assert found["whole"] and found["generation_s"] == pytest.approx(0.102, abs=1e-5)
    found = sparse_keys.measured_plainly(NETWORK, "fast-dllm", prompt=9, answer=96, seconds=0.01)
    assert (
        not found["whole"]
        and found["steps"]["full"]["timed"] == 2
        and found["generation_s"] == pytest.approx(0.102, abs=1e-5)
    )


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *given: str) -> dict[str, Any]:
    """The record of a command on a tiny model that sees as many positions as requests have."""
    monkeypatch.setenv("OUT", str(folder))
    monkeypatch.setattr(command, "load", lambda name: load({**CONFIGS["llada"], "max_sequence_length": 2048}))
    command.main(["tiny", "--device", "cpu", "--budget", "6MiB", "--traffic", "osc", *given])
    found: dict[str, Any] = json.loads((folder / "dllm-serve-osc-tiny-cpu.json").read_text())
    return found


@pytest.mark.soak
def test_the_command_measures_every_system_at_every_rate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = "--seconds", "0.4", "--rates", "queued,50,0.001", "--systems", "mosaic:no-such-cache,dllm-serve-packed"
    found = run(monkeypatch, tmp_path, *given)
    queued, point, idle, failed = found["points"]
    assert [one["system"] for one in found["points"]] == [*["dllm-serve-packed"] * 3, "mosaic:no-such-cache"]
    assert (queued["rate"], point["rate"]) == (None, 50.0) and queued["tokens"] > 0 and point["tokens"] > 0
    assert idle["came"] == idle["tokens"] == idle["steps"] == 0, "who waited before is forgotten"
    assert "latency_mean_s" not in queued and 0 < point["latency_mean_s"] <= point["latency_most_s"]
    assert "no-such-cache" in failed["failed"] and queued["failed"] is point["failed"] is None
    rows = [*tables.rows_of(found)]
    assert {len(row) for row in rows} == {len(tables.HEADER)} and rows[0][4] == ""  # no loop as published
    text, name = tables.section([found, found]), "dllm-serve-osc-tiny-cpu-0.png"
    assert text.startswith("**tiny, osc-like traffic, 6.00 MiB**") and text.count(f"(images/{name})") == 1
    assert curves.write_curves([found, {**found, "points": [queued]}], tmp_path) == [tmp_path / name]
    assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert curves.picture_of({**found, "points": [queued, failed]}) is None


@pytest.mark.soak
def test_every_system_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = run(monkeypatch, tmp_path, "--seconds", "1")
    points = {point["system"]: point for point in found["points"]}
    assert [*points] == [*systems.DEFAULT]
    assert all(point["failed"] is None and point["tokens"] > 0 for point in points.values())
    ours = [point for name, point in points.items() if name.startswith(systems.MOSAIC)]
    assert len(ours) == 3 and all(0 < point["floor_s"] < point["busy_s"] for point in ours)
    rows = {row[0].strip("`"): row for row in tables.rows_of(found)}
    assert max(float(rows[name][4]) for name in tables.PUBLISHED) == 1.0


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="sparse-dllm"):
        run(monkeypatch, tmp_path, "--systems", "sparse-dlm")
    for rates in ("0", "fast", ""):
        with pytest.raises(UsageError, match="requests a second"):
            run(monkeypatch, tmp_path, "--rates", rates)
    with pytest.raises(UsageError, match="one model a process"):
        command.main(["tiny", "tiny"])
    with pytest.raises(UsageError, match="like LLaDA"):
        systems.Loops(load(CONFIGS["sdar"]), cuda=False, budget_bytes=None, seed=0)
