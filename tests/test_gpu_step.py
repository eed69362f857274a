"""A whole step on a CUDA card: the CPU's logits, exactly the planned pages, nothing from PyTorch's allocator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
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
