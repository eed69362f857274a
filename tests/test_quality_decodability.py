"""Importance against decodability: by words on random tensors, and along answers of a model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from random import Random

import pytest
import torch
from test_quality_estimation import CONFIG

import mosaic
from benchmarks.quality.decodability import BINS, DecodabilitySettings, importance, measure, reaches
from mosaic.errors import UnknownName, UsageError
from mosaic.models.policies.registry import token_eviction


@pytest.mark.parametrize("seed", range(4))
def test_importance_is_that_of_the_paper_by_words(seed: int) -> None:
    rng, generator = Random(seed), torch.Generator().manual_seed(seed)
    kv_heads, group, size, pool = rng.choice((1, 2)), rng.choice((1, 3)), rng.choice((2, 5)), rng.choice((1, 3, 5))
    tokens = rng.randint(1, 7)
    q = torch.randn(tokens, kv_heads * group, size, generator=generator, dtype=torch.float64)
    keys = torch.randn(tokens, kv_heads, size, generator=generator, dtype=torch.float64)
    expected = [0.0] * tokens
    for query in q.tolist():
        for head, vector in enumerate(query):
            scores = [
                sum(a * b for a, b in zip(vector, key[head // group], strict=True)) / size**0.5 for key in keys.tolist()
            ]
            pooled = [max(scores[max(at - pool // 2, 0) : at + pool // 2 + 1]) for at in range(tokens)]
            total = sum(map(math.exp, pooled))
            expected = [sums + math.exp(score) / total for sums, score in zip(expected, pooled, strict=True)]
    assert importance(q, keys, pool).tolist() == pytest.approx(expected)


def test_the_tokens_with_the_most_are_asked_whether_they_are_decided() -> None:
    rng = Random(0)
    for _ in range(200):
        values = [rng.randint(0, 5) for _ in range(rng.randint(1, 8))]
        decided, count = [rng.random() < 0.4 for _ in values], rng.randint(1, 3)
        best = sorted(range(len(values)), key=lambda at: (-values[at], at))[:count]
        assert reaches(torch.tensor(values), torch.tensor(decided), count) == any(decided[at] for at in best)


def test_answers_are_measured_along_their_way() -> None:
    """Every step is counted; what is computed is the block, less what a cache or eviction leaves out."""
    options = {"remasking": "low_confidence_static", "steps": 8, "stop_at_eos": False}
    settings = DecodabilitySettings(alphas=(1.2, 1e6), tasks=("addition",), lengths=(), items=2, options=options)
    with mosaic.compile({**CONFIG, "num_hidden_layers": 3}, device="cpu", host_budget=0, seed=3) as model:
        shown: list[tuple[int, int]] = []
        found = json.loads(json.dumps(measure(model, settings, progress=lambda *now: shown.append(now))))
        among_masked = measure(model, replace(settings, alphas=(), preset="focus:importance=masked"))
    assert shown == [(1, 2), (2, 2)]
    every, cached, few, whole = found["ways"].values()
    assert list(found["ways"]) == ["all tokens", "dc+", "alpha 1.2", "alpha 1e+06"]
    assert every["computed"] == 32 * every["steps"] > cached["computed"] == whole["computed"]
    assert cached["again"] == whole["again"] < every["again"] and cached["steps"] == whole["steps"]
    assert few["computed"] / few["steps"] < cached["computed"] / cached["steps"]
    for row in found["ways"].values():
        assert row["computed_per_decoded"] == row["computed"] / row["decoded"]
    assert sum(found["decoded_per_step"].values()) == every["steps"]
    assert sum(int(count) * steps for count, steps in found["decoded_per_step"].items()) == every["decoded"]
    for name, signal in among_masked["signals"].items():
        assert signal["masked"] == found["signals"][name]["masked"] and signal["auc"] != found["signals"][name]["auc"]
    for signal in found["signals"].values():
        assert len(signal["decoded"]) == len(signal["masked"]) == BINS and 0 <= signal["auc"] <= 1
        assert 0 < signal["reached"] <= 1
        assert (
            sum(signal["decoded"]) < every["decoded"] and max(signal["masked"]) - min(signal["masked"]) < every["steps"]
        )
    pytest.importorskip("matplotlib")
    from benchmarks.quality.plot import decodability_png

    assert decodability_png(found, "title").startswith(b"\x89PNG")


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one answer"):
        DecodabilitySettings(items=0)
    with pytest.raises(UsageError, match=r"alpha is 0\.5"):
        DecodabilitySettings(alphas=(0.5,))
    with pytest.raises(UnknownName, match="fokus"):
        DecodabilitySettings(preset="fokus")
    assert token_eviction(DecodabilitySettings().preset).alpha == 1.5
