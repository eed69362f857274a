"""Plans of a generation's steps together: no other place of the weights takes less time."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from test_decoding import CONFIGS

import mosaic
from mosaic.decoding import GenerationConfig, fast_dllm
from mosaic.models.parts import Commit
from mosaic.models.phase import FULL_STEP, Phase
from mosaic.models.policies.sparse_keys import SparseKeys
from mosaic.models.residency import SHARES
from mosaic.planner.planner import Planner
from mosaic.planner.schedule import scheduled

STEPS = SparseKeys(retention=0.1).steps(FULL_STEP, 65536, 32)


@pytest.mark.parametrize(("budget", "host", "refreshes"), [
    ("16GiB", "64GiB", 128), ("20GiB", "0", 8),
    *(pytest.param(*given, marks=pytest.mark.soak) for given in [
        ("16GiB", "64GiB", 8), ("20GiB", "0", 128), ("20GiB", "2GiB", 8), ("20GiB", "2GiB", 128), ("14GiB", "8GiB", 8),
        ("14GiB", "8GiB", 128),
    ]),
])  # fmt: skip
def test_weights_lie_where_all_steps_take_the_least_time_together(budget: str, host: str, refreshes: int) -> None:
    planner = Planner("llada-8b", device="h200", budget=budget, host_budget=host)
    times = {"refresh": refreshes, "reuse": 0 if refreshes == 128 else 248}
    found, of_places = scheduled(planner, STEPS, times), []
    for place in SHARES:
        plans = {name: planner.with_pinned({"stream": place}).plan(step, limit=False) for name, step in STEPS.items()}
        if all(plan.fits for plan in plans.values()):
            of_places.append(sum(times[name] * plan.predicted_step_ms for name, plan in plans.items()))
    assert found.fits is bool(of_places)
    assert {plan.config["stream"] for plan in found.plans.values()} == {found.stream}
    assert not of_places or found.predicted_ms <= 1.0026 * min(of_places)


def test_a_step_that_runs_seldom_does_not_have_others_stream() -> None:
    planner = Planner("llada-8b", device="h200", budget="20GiB", host_budget="64GiB")
    alone = planner.plan(STEPS["refresh"], limit=False)
    found = scheduled(planner, STEPS, {"refresh": 8, "reuse": 248})
    assert (alone.config["stream"], found.stream) == ("25%", "embedding")
    assert scheduled(planner.with_pinned({"stream": "75%"}), STEPS, {"refresh": 8, "reuse": 248}).stream == "75%"


CONFIG = {**CONFIGS["llada"], "n_layers": 4, "d_model": 64, "mlp_hidden_size": 96, "vocab_size": 512, "embedding_size": 512,
          "mask_token_id": 511}  # fmt: skip
ASKED = GenerationConfig(gen_length=32, block_length=8, steps=32, cache="sparse:retention=0.1", stop_at_eos=False)


def placed(budget: str | None, *, others: bool = False, path: Path | None = None) -> tuple[list[int], set[str]]:
    """Tokens of an answer, and what its steps streamed; `others`: while somebody else has rows; `path`: of a model whose weights go
    once they have been read."""
    prompt = torch.randint(0, 500, (400,), generator=torch.Generator().manual_seed(0))
    found = set[str]()
    with mosaic.compile(path or CONFIG, seed=3, budget=budget, host_budget="2MiB") as model, ExitStack() as held:
        if path is not None:
            (path / "model.safetensors").unlink()
        if others:
            held.enter_context(model.open_sequence()).reserve(4)
        (answer,) = model.generate([prompt], ASKED, on_step=lambda step: found.add(str(step.plan.config["stream"])))
    return answer.token_ids.tolist(), found


def test_a_generation_has_its_weights_where_all_of_its_steps_take_the_least_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a canvas that is too long for a table. The Refresh alone would offload hidden states instead. Weights stay where they are
    beside others' rows, and if they cannot be read again."""
    monkeypatch.setattr(fast_dllm, "MOST_REFRESHED", 400)
    planner = Planner(CONFIG, device="cpu", budget="2400KiB", host_budget="2MiB")
    steps = SparseKeys(retention=0.1).steps(Phase(commit=Commit(score="confidence", rule="top")), 432, 8)
    expected = scheduled(planner, steps, {"refresh": 4, "reuse": 28}).stream
    alone, there = placed(None), placed("2400KiB")
    assert alone[1] == {"none"} and there == (alone[0], {expected}) and expected != "none"
    assert placed("2400KiB", others=True) == (alone[0], {"none"})
    with mosaic.compile(CONFIG, seed=3) as model:
        model.save(tmp_path)
    assert placed("2400KiB", path=tmp_path) == (alone[0], {"none"})
