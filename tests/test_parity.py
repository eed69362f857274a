"""Logits in float32 against stock transformers classes, for every move and chunk count, packed batches, poison mode.

Weights are drawn large (deviation 0.12, norms around 1), so that attention is far from uniform and a wrong rotation, a
wrong norm or a wrong expert shows. The bound is 1e-5 of the logits' scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from test_runtime_compiled import FAMILIES, sequences_of
from torch import Tensor, nn

import mosaic
from mosaic.planner import Request
from mosaic.runtime.compiled import CompiledModel

BOUND = 1e-5


def enlarge(model: CompiledModel) -> None:
    """Draw weights that exercise the model."""
    generator = torch.Generator().manual_seed(7)
    for name, view in model._weights.items():
        if not name.startswith("="):
            view.normal_(1.0 if "norm" in name or "ln_f" in name else 0.0, 0.12, generator=generator)


def logits_of(module: nn.Module, sequences: list[Tensor], shifted: bool) -> Tensor:
    """The reference's own float32 logits of every row, each sequence fully visible to itself."""
    rows = []
    for ids in sequences:
        mask = torch.zeros(1, 1, len(ids), len(ids))
        with torch.no_grad():
            logits = module.eval()(input_ids=ids[None], attention_mask=mask, use_cache=False).logits[0]
        rows.append(torch.cat([logits[:1], logits[:-1]]) if shifted else logits)
    return torch.cat(rows)


class Case:
    """A tiny model of one family with its inputs and the reference's answer."""

    def __init__(self, family: str) -> None:
        config, reference = FAMILIES[family]
        self.sequences = sequences_of((290, 17, 103), config)
        self.model = mosaic.compile(config, debug="poison")
        enlarge(self.model)
        self.expected = logits_of(reference(self.model), self.sequences, shifted=family == "dream")
        self.plan = self.model._planner.plan

    def run(self, config: dict[str, Any] | None) -> None:
        """One step with logits of all rows, in a configuration of our own, held against the reference."""
        self.model._bound.clear()
        self.model._planner.plan = self.plan if config is None else partial(self.plan, config=config)  # type: ignore[method-assign]
        everything = torch.arange(len(self.expected))
        step = self.model(self.sequences, masked=everything[::2], logits_for=everything)
        assert step.logits is not None
        scale = float(self.expected.abs().max())
        assert float((step.logits - self.expected).abs().max()) <= BOUND * scale
        chosen = self.expected[::2]
        log_sum = chosen.double().logsumexp(1)
        assert float((step.logsumexp - log_sum).abs().max()) <= BOUND * scale
        assert float((step.maximum - chosen.amax(1)).abs().max()) <= BOUND * scale
        assert float((step.confidence - (chosen.amax(1).double() - log_sum).exp()).abs().max()) <= BOUND * scale
        assert torch.equal(step.token_ids, chosen.argmax(1))


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    made = Case(request.param)
    yield made
    made.model.close()


def test_the_planners_own_choice(case: Case) -> None:
    case.run(None)


def test_every_configuration_of_the_grid(case: Case) -> None:
    """Head by logits or fused, attention together, by queries or by heads, every knob off or at each of its chunk sizes."""
    lengths = tuple(len(part) for part in case.sequences)
    planner = case.model._planner
    request = Request(seq_lens=lengths, masked=(sum(lengths) + 1) // 2, logit_rows=sum(lengths))
    space = planner.space(request.kind)
    names = [choice.name for choice in space.template.choices] + [knob.name for knob in space.template.knobs]
    configurations = list(space.at(request.dims()).grid())
    assert len(configurations) >= 6 * 3 * 3 * 3
    for config in configurations[::3]:  # a third, every knob at every setting among them
        case.run(dict(zip(names, (*config.choices, *config.rows), strict=True)))
