"""On a CUDA card: steps that are cut inside a layer, replayed from graphs at several sizes (`test_cut.py` has them on the CPU)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from compiled_runner import CompiledRunner
from dropping import CUT, UNCUT, Dropping
from test_cut import CONFIG, TENSORS, Sequence, filled, opened
from test_gpu_generation import DEVICE

from mosaic.runtime.compiled import CompiledModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card: torch.cuda.is_available() is False"),
]
RTOL = 1e-3  # of float32 sums in another order


@pytest.fixture
def model() -> Iterator[CompiledModel]:
    with closing(CompiledRunner(CONFIG, TENSORS, device=DEVICE, budget="8GiB", host_budget=0)) as runner:
        yield runner.model


def captured(model: CompiledModel, phase: str) -> set[int]:
    """Rows that graphs of a phase were captured for; 0 for one that is not the second of a step."""
    executors = [executor for executor in model.executors if executor.captured]
    documents = [executor.document for executor in executors if executor.document["phase"] == phase]
    return {document["dims"].get("kept", 0) for document in documents}


def on_card(live: list[Sequence]) -> list[Sequence]:
    return [replace(one, rtol=RTOL) for one in live]


def test_a_cut_that_keeps_every_row_changes_nothing(model: CompiledModel) -> None:
    """The same windows twice, so that both ways are replayed: tokens and decisions the same, scores within rounding."""
    rng = random.Random(0)
    live = opened(model, rng, 3)
    twins = [filled(model, one.tokens) for one in live]
    for _ in range(6):
        asked = [one.window(rng, CUT) for one in live]
        for _ in range(3):
            found = model.step(asked)
            whole = model.step([replace(r, phase=UNCUT, sequence=twin) for r, twin in zip(asked, twins, strict=True)])
            assert found[0].plan.dims["kept"] == found[0].plan.dims["tokens"]
            for one, other in zip(found, whole, strict=True):
                torch.testing.assert_close(one.score, other.score, rtol=RTOL, atol=1e-6)
                for name in ("token", "committed", "chosen"):
                    assert torch.equal(getattr(one, name), getattr(other, name))
    assert captured(model, "denoise_prefix") == {0} and captured(model, "denoise_suffix")
    for owned in (*(one.owned for one in live), *twins):
        owned.close()


def test_dropped_rows_have_no_keys_in_later_layers_and_are_not_decided(model: CompiledModel) -> None:
    """Few rows and all of them by turns, against plain code on the CPU."""
    rng = random.Random(1)
    cut = Dropping()
    phase = replace(CUT, cut=cut)
    live, sizes = on_card(opened(model, rng, 3)), set()
    windows = [one.window(rng, phase) for one in live]
    tokens = sum(len(request.token_ids) for request in windows)
    for turn in range(24):
        few = turn % 6 != 5
        asked = [
            one.limited(request, rng.randint(1, 2) if few else len(request.token_ids))
            for one, request in zip(live, windows, strict=True)
        ]
        found = model.step(asked)
        kept = sum(len(one.expect(*pair)) for one, *pair in zip(live, asked, found, strict=True))
        size = found[0].plan.dims["kept"]
        assert kept <= size and (few or size == tokens)
        assert size == min(bucket for bucket in cut.buckets(tokens) if bucket >= kept)
        sizes.add(size)
    assert len(sizes) > 1 and len(captured(model, "denoise_suffix") & sizes) > 1
    changes = model.workspace.changes()
    for _ in range(4):
        model.step([one.limited(request, 2) for one, request in zip(live, windows, strict=True)])
    assert model.workspace.changes() == changes  # sizes that alternate map nothing
    for one in live:
        one.close()
