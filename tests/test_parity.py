"""Families that see whole sequences, in float32 against stock transformers classes, in every configuration and phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import parity
import pytest
import torch
from test_runtime_compiled import FAMILIES, sequences_of
from torch import Tensor

from mosaic.runtime.compiled import CompiledModel


def logits_by(family: str) -> Callable[[CompiledModel], Callable[[Tensor], Tensor]]:
    """The reference's own float32 logits of every row of a sequence, which is fully visible to itself."""
    _, reference = FAMILIES[family]

    def of_model(model: CompiledModel) -> Callable[[Tensor], Tensor]:
        module = reference(model).eval()

        def logits(ids: Tensor) -> Tensor:
            mask = torch.zeros(1, 1, len(ids), len(ids))
            with torch.no_grad():
                found = module(input_ids=ids[None], attention_mask=mask, use_cache=False).logits[0]
            return torch.cat([found[:1], found[:-1]]) if family == "dream" else found

        return logits

    return of_model


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[parity.Case]:
    config, _ = FAMILIES[request.param]
    sequences = sequences_of(parity.LENGTHS, config)
    made = parity.Case(config, sequences, logits_by(request.param), tmp_path_factory.mktemp(request.param))
    yield made
    made.model.close()


class TestGrid(parity.GridTests):
    """Every configuration and phase."""
