"""A step in a configuration of its own, and the forms in which a call takes its tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_runtime_compiled import DREAM, LLADA, MOE, Module, sequences_of, weights_of
from torch import Tensor

import mosaic
from mosaic.errors import DoesNotFit, UnknownName, UsageError
from mosaic.models import load
from mosaic.models.parts import Commit
from mosaic.models.phase import Phase
from mosaic.models.step import StepSize
from mosaic.planner import Plan, Planner
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.step_plans import KEPT_PLANS
from mosaic.runtime.steps import StepRequest

LENGTH = 300
SETTINGS: list[dict[str, int | str | None]] = [
    {"head": "fused", "attention": "heads", "heads": 1, "proj": 128, "ffn": 256, "logits": 64},
    {"head": "logits", "attention": "queries", "proj": 256, "hidden": "host"},
    {"attention": "together", "stream": "all", "ffn": 128},
    {},
]


@pytest.fixture(scope="module")
def model() -> Iterator[CompiledModel]:
    with mosaic.compile(LLADA, host_budget="64MiB", debug="poison") as compiled:
        yield compiled


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return sequences_of((LENGTH,), LLADA)[0]


def test_a_step_runs_in_the_configuration_asked_for(model: CompiledModel, ids: Tensor) -> None:
    """Whatever it is, in any order, and the next step without one is the planner's own again."""
    free = model(ids).clone()
    for settings in (*SETTINGS, *SETTINGS[::-1]):
        step = model(ids, config=settings)
        assert settings.items() <= step.plan.config.items()
        unnamed = step.plan.config.keys() - settings.keys() - {"stream"}
        firsts = {"head": "logits", "attention": "together", "hidden": "device"}
        extent = {
            "heads": 1,
            "proj": 384,
            "ffn": 384,
            "logits": 192,
        }  # one chunk, where a loop with side ops is never off
        assert all(step.plan.config[name] in (firsts.get(name), extent.get(name)) for name in unnamed)
        torch.testing.assert_close(step.logsumexp, free.logsumexp, rtol=1e-5, atol=1e-5)
        assert torch.equal(step.rows, free.rows) and torch.equal(step.token_ids, free.token_ids)
    again = model(ids)
    assert {**again.plan.config, "stream": ""} == {**free.plan.config, "stream": ""}


def test_host_memory_is_reported_as_long_as_there_is_any(ids: Tensor) -> None:
    """A step had hidden states there, the next one has none, and `trim` gives their memory back."""
    with mosaic.compile(LLADA, host_budget="64MiB") as model:
        model(ids)
        assert "host" not in model.memory().planned and "host" not in str(model.memory())
        needed = model(ids, config={"hidden": "host"}).plan.pools["host"]
        model(ids, config={"hidden": "device"})
        report = model.memory()
        assert report.planned["host"] == 0 < needed == report.committed["host"] == report.resident["host"]
        assert "host" in str(report)
        model.trim()
        assert "host" not in str(model.memory()) and model.workspace.committed_bytes()["host"] == 0


def test_a_plan_may_be_asked_for_in_a_configuration(model: CompiledModel) -> None:
    plan = model.plan(LENGTH, config={"attention": "heads", "heads": 1})
    assert plan.config["attention"] == "heads" and plan.config["heads"] == 1


def test_steps_of_requests_take_a_configuration_too(model: CompiledModel, ids: Tensor) -> None:
    phase, found = Phase(commit=Commit(score="confidence", rule="top")), []
    rows = torch.arange(0, LENGTH, 3)
    request = StepRequest(phase=phase, token_ids=ids, rows=rows, current=ids[rows], quota=7)
    for settings in (
        {"attention": "queries", "proj": 128, "logits": 64},
        {"head": "fused", "attention": "heads", "heads": 1},
    ):
        (result,) = model.step([request], config=settings)
        assert settings.items() <= result.plan.config.items()
        found.append(result)
    assert torch.equal(found[0].chosen, found[1].chosen) and int(found[0].committed.sum()) == 7


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"atention": "heads"}, UnknownName, "Did you mean 'attention'"),
        ({"attention": "head"}, UnknownName, "Did you mean 'heads'"),
        ({"experts": 128}, UnknownName, "unknown knob 'experts'"),
        ({"proj": 100}, UsageError, "'proj' takes rows that are a multiple of 128, or none; got 100"),
        ({"proj": "128"}, UsageError, "got '128'"),
    ],
)
def test_settings_that_there_are_not_are_refused(
    model: CompiledModel, ids: Tensor, settings: Any, kind: type[Exception], message: str
) -> None:
    for attempt in (
        lambda: model(ids, config=settings),
        lambda: model.plan(LENGTH, config=settings),
        lambda: mosaic.compile(LLADA, config=settings),
    ):
        with pytest.raises(kind, match=message):
            attempt()


def test_a_configuration_that_does_not_fit_says_so(ids: Tensor) -> None:
    wide = {**LLADA, "mlp_hidden_size": 2048}
    with mosaic.compile(wide, budget="6MiB", host_budget=0) as model:
        assert model(ids).plan.config["ffn"] is not None
        with pytest.raises(DoesNotFit, match=r"needs .* as configured, the budget is 6\.00 MiB; leave `config` out"):
            model(ids, config={})
        with pytest.raises(DoesNotFit, match=r"of host memory as configured, the host budget is 0 B") as refused:
            model(ids, config={"stream": "all", "ffn": 128})
        assert refused.value.needed_bytes > refused.value.available_bytes == 0
        assert model(ids).plan.config["ffn"] is not None  # and the model works on


def test_weights_that_were_written_are_lost_in_a_move_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with mosaic.compile(LLADA, host_budget="64MiB") as model, caplog.at_level(logging.INFO):
        name = "model.transformer.ln_f.weight"
        model.weights()[name].fill_(7.0)
        model(torch.tensor([1, 256]), config={"stream": "layers"})
        assert [r.levelname for r in caplog.records if "what was written" in r.message] == ["WARNING"]
        assert float(model.weights()[name].mean()) < 2.0


def test_adopted_parameters_stay_where_they_are(ids: Tensor) -> None:
    with mosaic.compile(LLADA) as model:
        module = Module(LLADA, weights_of(model))
    with mosaic.compile(module, host_budget="64MiB") as adopted:
        assert adopted(ids, config={"attention": "queries"}).plan.config["attention"] == "queries"
        with pytest.raises(UsageError, match=r"'stream' is 'all', and the module's own parameters stay"):
            adopted(ids, config={"stream": "all"})


# --- forms of a call ------------------------------------------------------------------------------------------------------


def test_tokens_and_rows_are_taken_as_lists_and_arrays(model: CompiledModel) -> None:
    expected = model(torch.tensor([1, 256, 3, 256])).clone()
    for ids, masked in (
        ([1, 256, 3, 256], None),
        (np.array([1, 256, 3, 256]), None),
        ([np.int64(1), 256, 3, np.int32(256)], [1, 3]),
        ([[1, 256, 3, 256]], [[False, True, False, True]]),
        (((1, 256, 3, 256),), np.array([1, 3])),
    ):
        step = model(ids, masked)
        assert torch.equal(step.rows, expected.rows) and torch.equal(step.maximum, expected.maximum)
    batch = model([[1, 256], [256]])
    assert batch.rows.tolist() == [1, 2] and batch.plan.dims["seqs"] == 2


@pytest.mark.parametrize("ids", [None, "text", 7.5, {}, [None], [[1], None], [[[1]]], 3, object], ids=str)
def test_what_is_no_tokens_is_refused_by_name(model: CompiledModel, ids: Any) -> None:
    with pytest.raises(UsageError, match="token_ids: expected"):
        model(ids)


@pytest.mark.parametrize("config", [DREAM, MOE], ids=["dream", "moe"])
def test_a_step_beyond_the_models_context_is_warned_of_once(
    config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with mosaic.compile({**config, "max_position_embeddings": 16}) as model:
        for length in (16, 17, 40):
            model([1] * length, masked=[0])
    assert [r.message for r in caplog.records if "own context is 16" in r.message] == [
        f"{model.model.name}: a step over 17 positions, the model's own context is 16: what it predicts beyond is untrained"
    ]


# --- plans that were made ------------------------------------------------------------------------------------------------


class Counted:
    """A planner's `plan`, and the sizes that it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[StepSize] = []
        plan = Planner.plan

        def counted(planner: Planner, step: StepSize, **options: Any) -> Plan:
            self.asked.append(step)
            return plan(planner, step, **options)

        monkeypatch.setattr(Planner, "plan", counted)


def test_a_size_is_planned_once_for_all_who_ask(model: CompiledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, size, (ids,) = Counted(monkeypatch), StepSize(windows=(301,), rows=130), sequences_of((301,), LLADA)
    plan = model.check([size])
    assert len(counted.asked) == 1
    assert model.check([size, size]) is plan and model.check([replace(size, rows=129)]) is plan  # rows are rounded up
    assert model(ids, masked=range(131)).plan is plan
    assert len(counted.asked) == 1
    configured = model(ids, masked=range(131), config={"attention": "heads", "heads": 1}).plan
    assert configured is not plan and configured.config["attention"] == "heads" and len(counted.asked) == 2
    assert model.check([replace(size, windows=(205, 104))]).dims["seqs"] == 2 and len(counted.asked) == 3


def test_where_only_the_exact_size_fits_both_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    size = StepSize(windows=(3000,), rows=2900)
    whole: dict[str, int | str | None] = {"head": "logits", "ffn": 128, "proj": 128}  # logits of all rows take the most
    exact = Planner(load(LLADA), device="cpu").plan(size, config=whole).total_bytes
    with mosaic.compile(LLADA, device="cpu", budget=exact, config=whole) as tight:
        counted = Counted(monkeypatch)
        plan = tight.check([size])
        assert plan.dims["masked"] == 2900 and len(counted.asked) == 2
        assert tight.check([size]) is plan and len(counted.asked) == 2
        with pytest.raises(DoesNotFit, match="the budget is"):
            tight.check([replace(size, windows=(8192,))])


def test_plans_that_were_made_are_kept_to_a_number(model: CompiledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [StepSize(windows=(tokens,), rows=1) for tokens in range(3, 3 + KEPT_PLANS + 1)]
    counted = Counted(monkeypatch)
    model.check(sizes)
    made = len(counted.asked)
    model.check(sizes[1:])
    assert len(counted.asked) == made
    model.check(sizes[:1])
    assert len(counted.asked) == made + 1
