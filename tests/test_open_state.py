"""Plans beside open sequences: every step counts the rows that they hold, whatever its phase, and a call agrees with its plan."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from test_runtime_compiled import LLADA, sequences_of
from torch import Tensor

import mosaic
from mosaic.errors import DoesNotFit
from mosaic.models.parts import KEPT, KV, Commit
from mosaic.models.phase import Phase
from mosaic.models.step import StepSize
from mosaic.planner import Planner, Request
from mosaic.planner.check import check_plan
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.steps import StepRequest

ROW = 2 * 2 * 2 * 16 * 4  # layers, keys and values, KV heads, head size, float32
TOKENS = 300
DECIDE = Phase(commit=Commit(score="confidence", rule="top"))


@pytest.fixture
def ids() -> Tensor:
    return sequences_of((TOKENS,), LLADA)[0]


@pytest.fixture
def model() -> Iterator[CompiledModel]:
    with mosaic.compile(LLADA, host_budget=0, debug="poison") as compiled:
        yield compiled


def request_of(ids: Tensor) -> StepRequest:
    rows = torch.arange(0, TOKENS, 2)
    return StepRequest(phase=DECIDE, token_ids=ids, rows=rows, current=ids[rows], quota=1)


def test_a_step_counts_the_rows_that_others_hold(model: CompiledModel, ids: Tensor) -> None:
    """Grown, shrunk and closed at random: plan, call, step and memory agree, and the results are unchanged."""
    expected, source, highest = model(ids).clone(), random.Random(3), 0
    opened = [model.open_sequence() for _ in range(4)]
    for turn in range(12):
        sequence = source.choice(opened)
        sequence.reserve(sequence.length + source.randint(1, 3000))
        if turn % 5 == 4:
            opened[opened.index(sequence)].close()
        plan, step = model.plan(TOKENS, masked=len(expected.rows)), model(ids)
        assert plan.components["state"] >= model.state_rows.get("kv", 0) * ROW == plan.dims.get("kv_rows", 0) * ROW
        assert step.plan.fits and check_plan(step.plan.document) == [] == check_plan(plan.document)
        assert torch.equal(step.maximum, expected.maximum)
        for found in (step.plan, model.step([request_of(ids)])[0].plan):
            assert found.components["state"] >= model.state_rows.get("kv", 0) * ROW
            assert found.components["state"] <= max(model.state_rows.get("kv", 0), 64) * 9 // 8 * ROW + 2 * 4096
            highest = max(highest, found.components["state"])
            assert model.workspace.committed_bytes()["state/kv"] == highest
            assert model.memory().planned["state/kv"] == found.components["state"] or found is step.plan
    for sequence in opened:
        sequence.close()
    assert model.memory().resident["state/kv"] == model.workspace.committed_bytes()["state/kv"] == highest
    model.trim()
    assert model.memory().resident["state/kv"] == model.workspace.committed_bytes()["state/kv"] == 0
    assert not model.state_rows and model(ids).plan.components["state"] == 0


def test_plan_check_and_call_agree_beside_open_sequences(ids: Tensor) -> None:
    """In budgets from too little to enough, none says that a step fits which another refuses."""
    with mosaic.compile(LLADA, host_budget=0) as free:
        step = free.plan(TOKENS, masked=TOKENS).total_bytes
    shape = StepSize(windows=(TOKENS,), rows=TOKENS)
    said = set()
    for rows in (0, 100, 1000, 4000):
        for extra in (0, 100, 600, 1100, 4500):
            with mosaic.compile(LLADA, budget=step + extra * ROW, host_budget=0) as model:
                held = model.open_sequence()
                held.reserve(rows)
                answers = []
                for ask in (
                    lambda m=model: m.plan(TOKENS, masked=TOKENS).fits,
                    lambda m=model: m.check([shape]).fits,
                    lambda m=model: m(ids, torch.arange(TOKENS)).plan.fits,
                    lambda m=model: m.step([request_of(ids)])[0].plan.fits,
                ):
                    try:
                        answers.append(ask())
                    except DoesNotFit as refused:
                        assert refused.needed_bytes > refused.available_bytes == step + extra * ROW
                        answers.append(False)
                assert len(set(answers[:3])) == 1, (rows, extra, answers)
                said.add(answers[0])
    assert said == {True, False}


def test_the_largest_context_is_the_one_beside_open_sequences(ids: Tensor) -> None:
    budget = 8 << 20
    with mosaic.compile(LLADA, budget=budget, host_budget=0) as model:
        alone = model.plan(TOKENS).max_ctx_tokens
        held = model.open_sequence()
        held.reserve(6000)
        beside = model.plan(TOKENS).max_ctx_tokens
        assert 0 < beside < alone
        assert model.plan(beside, masked=TOKENS).fits
        with pytest.raises(DoesNotFit, match=rf"the largest context that fits is {beside:,} tokens"):
            model.plan(beside + 1, masked=TOKENS)


def test_a_request_counts_what_is_held() -> None:
    planner = Planner(mosaic.models.load(LLADA), device="cpu", host_budget=0)
    alone, beside = (planner.plan(Request(seq_lens=(TOKENS,), states=rows)) for rows in ({}, {KV: 1000}))
    assert beside.components == {**alone.components, "state": 1000 * ROW} and beside.weights == alone.weights
    assert (
        beside.peak_bytes == alone.peak_bytes
        and planner.plan(Request(seq_lens=(9,), states={KV: 0})).dims.get("kv_rows") is None
    )
    cached = Request(seq_lens=(8,), key_lens=(40,), states={KV: 1040}, phase=Phase(cache=KEPT))
    assert cached.at(100).dims()["kv_rows"] == 1100
