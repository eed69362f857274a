"""Steps on a CUDA card, in the configurations asked for: the CPU's logits, exactly the planned pages, nothing from PyTorch's
allocator; long steps of large models whatever way attention takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import parity
import pytest
import torch
from test_parity import logits_by
from test_runtime_compiled import FAMILIES, sequences_of

import mosaic
from benchmarks.cases import cut
from mosaic.models import load
from mosaic.runtime.compiled import CompiledModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card: torch.cuda.is_available() is False"),
]


@pytest.fixture(params=list(FAMILIES))
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[str, CompiledModel, CompiledModel]]:
    """The same model on the CPU and on the card, with the same weights."""
    config, _ = FAMILIES[request.param]
    generator = torch.Generator().manual_seed(7)
    with mosaic.compile(config) as cpu, mosaic.compile(config, device="h200", debug="poison") as card:
        for name, view in cpu.weights().items():
            if not name.startswith("="):
                view.normal_(1.0 if "norm" in name or "ln_f" in name else 0.0, 0.12, generator=generator)
            card.weights()[name].copy_(view)
        yield request.param, cpu, card


def test_a_step_has_the_cpus_logits(pair: tuple[str, CompiledModel, CompiledModel]) -> None:
    family, cpu, card = pair
    sequences = sequences_of((290, 17, 103), FAMILIES[family][0])
    rows = torch.arange(410)
    expected = cpu(sequences, masked=rows[::2], logits_for=rows).clone()
    step = card(sequences, masked=rows[::2], logits_for=rows)
    assert step.logits is not None and expected.logits is not None
    scale = float(expected.logits.abs().max())
    assert float((step.logits.cpu() - expected.logits).abs().max()) <= 1e-5 * scale
    assert float((step.logsumexp.cpu() - expected.logsumexp).abs().max()) <= 1e-5 * scale
    assert float((step.entropy.cpu() - expected.entropy).abs().max()) <= 1e-4 * scale
    assert torch.equal(step.token_ids.cpu(), expected.token_ids)


def test_pages_are_the_plans_and_the_drivers(pair: tuple[str, CompiledModel, CompiledModel]) -> None:
    family, _, card = pair
    sequences = sequences_of((1000,), FAMILIES[family][0])
    card(sequences)  # kernels are compiled and loaded
    torch.cuda.synchronize()
    pool = card.workspace.pages
    pool.mark()  # type: ignore[attr-defined]
    highest, changes = card.memory().committed["workspace"], []
    for length in (500, 3000, 100, 3000, 500):
        before = torch.cuda.memory_allocated()
        card(sequences_of((length,), FAMILIES[family][0]))
        report = card.memory()
        highest = max(highest, report.planned["workspace"])
        assert report.committed["workspace"] == highest
        assert torch.cuda.memory_allocated() == before
        changes.append(card.workspace.changes())
    assert changes[1] == changes[-1]  # sizes that were there before map nothing
    card.trim()
    report = card.memory()
    assert report.committed["workspace"] == report.planned["workspace"] < highest


@pytest.mark.parametrize("family", list(FAMILIES))
def test_configurations_of_the_grid_have_the_references_logits(family: str, tmp_path: Path) -> None:
    """The parity grid of the CPU, on the card: every pair of settings, in full and cached steps, poisoned."""
    config, _ = FAMILIES[family]
    case = parity.Case(config, sequences_of(parity.LENGTHS, config), logits_by(family), tmp_path)
    try:
        with case.opened(device="h200") as card:
            for phases in (parity.FULL, parity.CACHED):
                assert parity.check_grid(case, phases, few=150, model=card) >= 20
    finally:
        case.model.close()


LONG, LAYERS = 16384, 4
MORE_THAN_TOGETHER = 1.5
"""Times the bf16 error of attention at once, which the other ways may have; weights read from each other's places give 0.07
of the logits' norm and more."""


def long_logits(
    name: str, dtype: str, weights: dict[str, torch.Tensor], ways: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """Logits of a 64th of 16,384 rows of the model's first layers with these weights, by way of attention; weights are drawn,
    and kept, if there are none."""
    generator = torch.Generator("cuda").manual_seed(7)
    found, few = {}, cut(load(name), LAYERS)
    with mosaic.compile(few, device="h200", dtype=dtype, budget="72GiB", host_budget=0) as model:
        for tensor, view in model.weights().items():
            if weights.get(tensor) is not None:
                view.copy_(weights[tensor])
            elif view.dim() == 1 and not tensor.startswith(
                "="
            ):  # biases and head norms that can be told from each other
                view.normal_(0.0 if tensor.endswith("bias") else 1.0, 0.3, generator=generator)
        ids = torch.randint(0, model.mask_token_id, (LONG,), generator=torch.Generator().manual_seed(1))
        rows = torch.arange(63, LONG, 64)
        ids[rows] = model.mask_token_id
        for way in ways:
            asked = {"attention": way, "head": "logits", "logits": 128, "proj": 2048, "ffn": 2048}
            asked |= {"heads": 1} if way == "heads" else {}
            step = model(ids, rows, logits_for=rows, config=asked)
            assert asked.items() <= step.plan.config.items()
            assert step.logits is not None
            found[way] = step.logits.float().cpu()
        weights |= {tensor: view.clone() for tensor, view in model.weights().items()}
    return found


@pytest.mark.parametrize("name", ["dream-7b", "sdar-8b"])
def test_attention_by_queries_and_by_heads_equals_attention_together_at_16k(name: str) -> None:
    """In bf16, from the same weights as a step in float32: the ways differ from it by what bf16 does, attention at once alike."""
    weights: dict[str, torch.Tensor] = {}
    found = long_logits(name, "bfloat16", weights, ("together", "queries", "heads"))
    truth = long_logits(name, "float32", weights, ("together",))["together"]
    errors = {way: float((logits - truth).norm() / truth.norm()) for way, logits in found.items()}
    print(
        f"{name}, relative errors against float32: {errors}; queries: equal bits {torch.equal(*list(found.values())[:2])}"
    )
    assert all(torch.isfinite(logits).all() for logits in found.values())
    assert max(errors.values()) <= MORE_THAN_TOGETHER * errors["together"] and errors["together"] < 0.07, errors
