"""dLLM-Serve's experiments: the loops decide what Mosaic, or a plain statement, decides, in every arrangement of rows; points and
their records."""

from __future__ import annotations

import json
import time
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
from benchmarks.dllm_serve.trace import KINDS, Asked, digest_of, trace
from benchmarks.loops import PlainModel, generate_plainly
from mosaic import decoding
from mosaic.decoding import Submission
from mosaic.decoding.config import GenerationConfig, resolve
from mosaic.errors import UnknownName, UsageError
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


def packed_steps(rows: int, places: int, *, published: bool = False) -> phases.PackedSteps:
    return phases.PackedSteps(NETWORK, phases.Pool.of(NETWORK, rows), places, published=published)


def arrangements(dual: bool) -> dict[str, Callable[[], System]]:
    """Every arrangement of the rows of an algorithm; a scheduler's pool has rows for two of three requests."""
    loop = padded.fast_dllm if dual else padded.sparse_dllm
    rows, pages = (
        max(of(asked) for asked, _ in requests_of(SIZES)) for of in (lambda one: rows_of(one, dual=dual), pages_of)
    )
    every: dict[str, Callable[[], System]] = {
        "padded": lambda: Static(padded_loop(NETWORK, loop), 2),
        "packed": lambda: Static(packed_loop(packed_steps(3 * rows, 3), dual=dual), 3),
    }
    if not dual:
        every["scheduled"] = lambda: Scheduled(packed_steps(2 * rows, 8), 200)
        every["scheduled, published"] = lambda: Scheduled(packed_steps(2 * pages, 8, published=True), 200)
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
    for name, make in arrangements(cache == "dual").items():
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


# --- traffic and points -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_a_trace_is_the_same_for_all_and_as_its_kind_says(name: str) -> None:
    kind = KINDS[name]
    found = [*islice(trace(kind, 5), 4000)]
    assert found == [*islice(trace(kind, 5), 4000)] and digest_of(kind, 5) != digest_of(kind, 6)
    for ends, lengths in ((kind.prompts, [one.prompt for one in found]), (kind.answers, [one.answer for one in found])):
        assert ends[0] <= min(lengths) < 1.1 * ends[0] and 0.9 * ends[1] < max(lengths) <= ends[1]
    assert all(one.answer % 32 == 0 for one in found) and [one.number for one in found] == [*range(4000)]
    gaps = torch.tensor([one.at_s for one in found]).diff()
    assert gaps.mean() == pytest.approx(1.0, abs=0.1) and gaps.min() >= 0
    assert gaps.std() == pytest.approx(kind.shape**-0.5, rel=0.1)


class Fake:
    """Serves one request after the other, in steps of 5 ms, but for one that never ends."""

    asynchronous = False

    def __init__(self, never: int) -> None:
        self.decided, self.waiting, self.never = 0, list[Asked](), never

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting)

    def submit(self, asked: Asked, prompt: Tensor) -> None:
        assert len(prompt) == asked.prompt
        self.waiting.append(asked)

    def reset(self) -> None:
        self.waiting.clear()

    def step(self) -> Found:
        time.sleep(5e-3)
        first = self.waiting.pop(0)
        if first.number == self.never:
            return []
        self.decided += first.answer
        return [(first, torch.zeros(first.answer))]


@pytest.mark.soak
def test_latencies_are_of_requests_of_the_first_half_to_their_end_or_to_the_last() -> None:
    """Requests 0.05 s apart, for half a second; the one that never ends has its age."""
    arch = NETWORK.arch
    asked = (Asked(number, float(number), 3, 32) for number in count())
    found = driving.driven(Fake(never=2), asked, arch, rate=20.0, seconds=0.5, cuda=False)
    assert (found["came"], found["ended"], found["tokens"]) == (10, 9, 9 * 32)
    assert (found["counted"], found["unended"]) in [(5, 1), (6, 1)]  # the sixth comes at the middle
    assert found["latency_most_s"] == pytest.approx(0.4, abs=0.03) and found["latency_median_s"] < 0.04
    assert found["latency_span_s"] == pytest.approx(0.4, abs=0.03) and found["latency_deviation_s"] > 0.1
    assert found["steps"] == 10 and found["busy_s"] == pytest.approx(0.05, abs=0.03)
    asked = (Asked(number, float(number), 3, 32) for number in count())
    queued = driving.driven(Fake(never=-1), asked, arch, rate=driving.QUEUED, seconds=0.2, cuda=False)
    assert queued["rate"] is None and queued["came"] == queued["ended"] - 1 + driving.BACKLOG
    assert queued["tokens_per_s"] == pytest.approx(32 * queued["ended"] / queued["seconds"])


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *given: str) -> dict[str, Any]:
    """The record of a command on a tiny model that sees as many positions as requests have."""
    monkeypatch.setenv("OUT", str(folder))
    monkeypatch.setattr(command, "load", lambda name: load({**CONFIGS["llada"], "max_sequence_length": 2048}))
    command.main(["tiny", "--device", "cpu", "--budget", "6MiB", "--traffic", "osc", *given])
    found: dict[str, Any] = json.loads((folder / "dllm-serve-osc-tiny-cpu.json").read_text())
    return found


@pytest.mark.soak
def test_the_command_measures_every_system_at_every_rate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = "--seconds", "0.4", "--rates", "queued,50", "--systems", "mosaic:no-such-cache,dllm-serve-packed"
    found = run(monkeypatch, tmp_path, *given)
    queued, point, failed = found["points"]
    assert [one["system"] for one in found["points"]] == [*["dllm-serve-packed"] * 2, "mosaic:no-such-cache"]
    assert (queued["rate"], point["rate"]) == (None, 50.0) and queued["tokens"] > 0 and point["tokens"] > 0
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
        systems.Loops(load(CONFIGS["sdar"]), budget_bytes=None, seed=0)
