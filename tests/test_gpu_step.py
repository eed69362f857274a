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
    for length in (500, 3000, 100):
        before = torch.cuda.memory_allocated()
        card(sequences_of((length,), FAMILIES[family][0]))
        report = card.memory()
        assert report.committed["workspace"] == report.planned["workspace"]
        assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("family", list(FAMILIES))
def test_configurations_of_the_grid_have_the_references_logits(family: str, tmp_path: Path) -> None:
    """The parity grid of the CPU, on the card: every pair of settings, in full and cached steps, poisoned."""
    config, _ = FAMILIES[family]
    case = parity.Case(config, sequences_of(parity.LENGTHS, config), logits_by(family), tmp_path)
    try:
        with case.opened(device="h200") as card:
            for phases in (parity.FULL, parity.CACHED):
                assert parity.check_grid(case, phases, few=60, model=card) >= 20
    finally:
        case.model.close()


LONG = 16384
BF16_ERROR = 0.03
"""Of the logits' norm, between two orders of bf16 arithmetic; weights read from each other's places are 0.07 and more."""


@pytest.mark.parametrize("name", ["dream-7b", "sdar-8b"])
def test_attention_by_queries_and_by_heads_equals_attention_together_at_16k(name: str) -> None:
    """Random weights, with biases and head norms that differ enough to be told from each other."""
    generator = torch.Generator("cuda").manual_seed(7)
    with mosaic.compile(name, device="h200", budget="72GiB", host_budget=0) as model:
        for tensor, view in model.weights().items():
            if view.dim() == 1 and not tensor.startswith("="):
                view.normal_(0.0 if tensor.endswith("bias") else 1.0, 0.3, generator=generator)
        ids = torch.randint(0, model.mask_token_id, (LONG,), generator=torch.Generator().manual_seed(1))
        rows = torch.arange(63, LONG, 64)
        ids[rows] = model.mask_token_id
        expected: torch.Tensor | None = None
        for asked in (
            {"attention": "together", "head": "logits", "logits": 128},
            {"attention": "queries", "head": "logits", "logits": 128, "proj": 2048, "ffn": 2048},
            {"attention": "heads", "head": "logits", "logits": 128, "heads": 1, "proj": 2048, "ffn": 2048},
        ):
            step = model(ids, rows, logits_for=rows, config=asked)
            assert asked.items() <= step.plan.config.items()
            assert step.logits is not None
            found = step.logits.float().cpu()
            expected = found if expected is None else expected
            error = float((found - expected).norm() / expected.norm())
            print(f"{name}, {asked['attention']}: relative error {error:.2e}")
            assert torch.isfinite(found).all() and error <= BF16_ERROR, asked
