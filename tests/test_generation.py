"""Generation on compiled models: the same tokens under every plan, in exactly the memory that was predicted."""

from __future__ import annotations

import gc
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_runner import CompiledRunner
from fake_cuda import FakeDriver
from own_algorithms import as_generator
from reference_runner import random_tensors
from test_decoding import CONFIGS, prompt_of

import mosaic
from mosaic import decoding, models
from mosaic.decoding.canvas import COMMIT
from mosaic.errors import DoesNotFit, UsageError
from mosaic.models.parts import KEPT, SAMPLE, Commit
from mosaic.models.phase import Phase
from mosaic.runtime.cuda_pool import CudaPool
from mosaic.runtime.ledger import DeviceLedger
from mosaic.runtime.page_pool import PagePool
from mosaic.runtime.state_rows import RowTable
from mosaic.runtime.steps import StepRequest
from mosaic.runtime.workspace import RESERVE_BYTES, Workspace

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "llada": ("llada", {"gen_length": 16, "block_length": 8, "steps": 8}),
    "llada-guided": ("llada", {"gen_length": 16, "block_length": 8, "steps": 8, "cfg_scale": 1.0, "temperature": 0.5}),
    "dream-nucleus": ("dream", {"gen_length": 12, "steps": 6, "alg": "entropy", "temperature": 0.7, "top_p": 0.9}),
    "dual-cache": (
        "llada",
        {"gen_length": 16, "block_length": 8, "algorithm": "fast-dllm", "threshold": 0.4, "cache": "dual"},
    ),
    "sdar": ("sdar", {"gen_length": 24, "temperature": 1.0, "threshold": 0.3}),
    "llada2.1": ("sdar", {"gen_length": 24, "algorithm": "llada2.1", "threshold": 0.2, "edit_threshold": 0.1}),
}
PLANS: dict[str, dict[str, Any]] = {
    "chunked": {"config": {"proj": 128, "ffn": 128, "logits": 64, "attention": "queries", "head": "fused"}},
    "streamed": {"config": {"stream": "all"}, "host_budget": "64MiB"},
    "hidden on the host": {"config": {"hidden": "host", "stream": "layers"}, "host_budget": "64MiB"},
    "poisoned": {"debug": "poison"},
}


def runner_of(family: str, **options: Any) -> CompiledRunner:
    config = CONFIGS[family]
    return CompiledRunner(config, random_tensors(models.load(config).architecture, 3), **options)


def generated(family: str, options: dict[str, Any], lengths: tuple[int, ...], **compiled: Any) -> list[list[int]]:
    runner = runner_of(family, **compiled)
    try:
        found = decoding.generate(runner, [prompt_of(n) for n in lengths], stop_at_eos=False, **options)
    finally:
        runner.close()
    return [answer.token_ids.tolist() for answer in found]


LENGTHS = (150, 9)
"""More than one chunk of the projections' tile, and odd."""


@cache
def by_the_planners_own_choice(way: str) -> list[list[int]]:
    family, options = WAYS[way]
    return generated(family, options, LENGTHS)


@pytest.mark.grid(together=1)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("way", WAYS)
def test_every_plan_generates_the_same(plan: str, way: str) -> None:
    family, options = WAYS[way]
    assert generated(family, options, LENGTHS, **PLANS[plan]) == by_the_planners_own_choice(way)


@pytest.mark.some
@pytest.mark.parametrize("lengths", [pytest.param((9,), marks=pytest.mark.soak), (30,), (21, 4)])
@pytest.mark.parametrize("way", WAYS)
def test_the_peak_of_a_generation_is_the_predicted_one(way: str, lengths: tuple[int, ...]) -> None:
    family, options = WAYS[way]
    runner = runner_of(family)
    committed: list[int] = []

    def measure(step: decoding.Step) -> None:
        held, kept = runner.model.workspace.committed_bytes(), runner.planned_bytes
        assert held == {pool: kept[pool] for pool in held}  # to the byte, the most that a step has needed
        committed.append(step.peak_bytes)

    decoding.generate(runner, [prompt_of(n) for n in lengths], stop_at_eos=False, on_step=measure, **options)
    assert runner.checked is not None
    peak, predicted = max(committed), runner.checked.total_bytes
    assert peak == predicted if len(lengths) == 1 else peak <= predicted  # several need not meet their largest at once
    assert not runner.model.state_rows
    runner.model.trim()
    last = runner.model.memory()  # what is left at the end is the last step's, without its state
    assert last.committed == {**last.planned, **{pool: 0 for pool in last.planned if pool.startswith("state/")}}
    runner.close()


def test_the_state_grows_without_copying() -> None:
    """A sequence that is longer from step to step: its rows stay where they are, and pages come at the end."""
    runner = runner_of("sdar")
    sequence, state = runner.model.open_sequence(), runner.model.workspace.range("state/kv")
    sizes, address = [], state.address
    first: torch.Tensor | None = None
    for start in range(0, 512, 64):
        sequence.reserve(start + 64)
        tokens = prompt_of(64, seed=start)
        nothing = torch.empty(0, dtype=torch.int64)
        window: dict[str, Any] = {"token_ids": tokens, "start": start, "key_len": start + 64}
        (done,) = runner.step([StepRequest(phase=COMMIT, sequence=sequence, rows=nothing, current=nothing, **window)])
        assert state.committed_bytes == done.plan.components["state"]
        sizes.append(state.committed_bytes)
        row_bytes = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head size, float32
        rows = state.tensor[: 64 * row_bytes].clone()
        first = rows if first is None else first
        assert torch.equal(first, rows) and first.any()
    assert state.address == address
    assert sorted(set(sizes)) == list(dict.fromkeys(sizes)) and len(set(sizes)) > 3
    sequence.close()
    runner.close()


def test_rows_of_closed_sequences_are_used_again() -> None:
    memory = RowTable("kv")
    first, second, third = memory.open(), memory.open(), memory.open()
    for sequence in (first, second, third):
        sequence.reserve(4)
    second.close()
    second.close()
    fourth = memory.open()
    fourth.reserve(6)
    assert fourth.slots().tolist() == [4, 5, 6, 7, 12, 13]
    assert memory.rows == 14
    third.close()
    assert memory.rows == 14
    fourth.close()
    assert memory.rows == 4
    first.close()
    assert memory.rows == 0
    with pytest.raises(UsageError, match="reserve more"):
        first.slots(0, 1)


def test_a_generation_that_does_not_fit_is_refused_before_it_starts() -> None:
    options: dict[str, Any] = {"gen_length": 64, "block_length": 8, "steps": 64}
    open_ended = runner_of("llada")
    config = as_generator(decoding.GenerationConfig(**options), open_ended.architecture)
    budget = open_ended.check(decoding.shapes(config, [200], open_ended.architecture))
    open_ended.close()
    runner = runner_of("llada", budget=budget.total_bytes)
    steps: list[decoding.Step] = []
    with pytest.raises(DoesNotFit, match="the largest context that fits is") as refused:
        decoding.generate(runner, [prompt_of(400)], on_step=steps.append, **options)
    assert refused.value.needed_bytes > refused.value.available_bytes == budget.total_bytes
    assert not steps
    short = decoding.generate(runner, [prompt_of(9)], gen_length=8, block_length=8, steps=8, stop_at_eos=False)
    assert len(short[0].token_ids) == 8  # and the model works on
    runner.close()


def test_open_sequences_are_part_of_plans() -> None:
    runner = runner_of("sdar")
    other = runner.model.open_sequence()
    alone = decoding.generate(runner, [prompt_of(20)], gen_length=16, stop_at_eos=False)
    before = runner.peak_bytes
    other.reserve(40_000)
    crowded = decoding.generate(runner, [prompt_of(20)], gen_length=16, stop_at_eos=False)
    assert crowded[0].token_ids.tolist() == alone[0].token_ids.tolist()
    row = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head size, bytes
    assert runner.peak_bytes >= before + 40_000 * row // 2
    other.close()
    runner.close()


REQUEST: dict[str, Any] = {
    "phase": Phase(cache=KEPT, commit=Commit(score="confidence", rule="top")),
    "token_ids": torch.tensor([1, 2]), "key_len": 2, "rows": torch.tensor([0]), "current": torch.tensor([95]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"key_len": 1}, "sees that many keys at least, got 1"),
        ({"key_len": 9}, "reserve more"),
        ({"sequence": None}, "needs a sequence that this model has opened"),
        ({"rows": torch.tensor([2])}, r"rows of a window of 2 tokens are in \[0, 2\), got \[2\]"),
        ({"rows": torch.tensor([], dtype=torch.int64)}, "decides at least one row"),
        ({"token_ids": torch.tensor([], dtype=torch.int64)}, "at least one token"),
        (
            {
                "phase": Phase(cache=KEPT, head=SAMPLE, commit=Commit(score="confidence", rule="top")),
                "temperature": 0.5,
            },
            "needs a key for every row",
        ),
    ],
)
def test_requests_that_make_no_step_are_refused(changed: dict[str, Any], message: str) -> None:
    runner = runner_of("sdar")
    sequence = runner.model.open_sequence()
    sequence.reserve(4)
    with pytest.raises(UsageError, match=message):
        runner.step([StepRequest(**{**REQUEST, "sequence": sequence, **changed})])
    with pytest.raises(UsageError, match="at least one request"):
        runner.step([])
    first = StepRequest(**{**REQUEST, "sequence": sequence})
    with pytest.raises(UsageError, match=r"share their phase, got Phase\(.* and Phase\("):
        runner.step([first, StepRequest(**{**REQUEST, "sequence": sequence, "phase": Phase(cache=KEPT)})])
    assert runner.step([first])[0].committed.tolist() == [False]  # quota 0
    runner.close()


def test_a_second_generation_maps_nothing_and_trimming_is_a_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over pages of a device, whose driver counts. What a generation held is kept, and counted, for the next."""
    driver = FakeDriver(1 << 40)
    pool = CudaPool(driver, DeviceLedger(1 << 40))
    opened = Workspace(pool=pool, host=PagePool())
    monkeypatch.setattr("mosaic.runtime.engine.open_workspace", lambda planner, *, ahead: opened)
    with mosaic.compile(CONFIGS["sdar"], host_budget=0) as model:

        def generate() -> list[int]:
            (found,) = model.generate(torch.arange(300) % 50, gen_length=16, stop_at_eos=False)
            return found.token_ids.tolist()

        tokens, report, calls = generate(), model.memory(), len(driver.calls)
        assert report.committed["state/kv"] > 0 and not model.state_rows
        assert generate() == tokens and model.memory().committed == report.committed
        assert not {"create", "map", "set_access", "unmap"} & set(driver.calls[calls:])
        assert driver.used_bytes == sum(report.committed.values())
        assert pool.ledger.held()["state/kv"] == report.committed["state/kv"]
        calls = len(driver.calls)
        model.trim()
        assert model.memory().committed["state/kv"] == 0 and driver.calls[calls:].count("unmap") <= 5
        assert generate() == tokens
    assert not driver.used_bytes


def test_a_closed_model_holds_no_addresses() -> None:
    """Neither views of results that were copied nor executors keep its ranges reserved."""

    def reserved() -> int:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        return int(fields["VmSize"].split()[0]) << 10

    gc.collect()
    before = reserved()
    model = mosaic.compile(CONFIGS["sdar"], budget=RESERVE_BYTES)
    model.generate(torch.arange(9), gen_length=16, stop_at_eos=False)
    opened = reserved()
    model.close()
    gc.collect()
    assert opened - before > RESERVE_BYTES // 2 and reserved() - before < RESERVE_BYTES // 2
