"""Sets of keys against what tokens would take: by words on random tensors, and along answers of a model."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
import torch
from test_session import FAMILIES

import mosaic
from benchmarks.quality.estimation import EstimationSettings, Plain, canvases, estimate, measures, union_sizes
from benchmarks.quality.replay import Records, recording
from benchmarks.quality.vocabulary import EOS, MASK
from mosaic.decoding import GenerationConfig, generate
from mosaic.errors import UsageError

CONFIG: dict[str, Any] = {
    **FAMILIES["sdar"], "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "block_size": 32, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 640, "mask_token_id": MASK,
    "eos_token_id": EOS, "max_position_embeddings": 2048,
}  # fmt: skip


def by_words(q: list[Any], keys: list[Any], k: int, page: int, first: list[set[int]] | None) -> dict[str, list[float]]:
    """Equations 1 and 2, Quest's bounds and the union, with sets and loops in float64."""
    heads, groups = len(keys[0]), len(q[0]) // len(keys[0])
    found: dict[str, list[float]] = {}
    for head in range(heads):
        shares = [[0.0] * len(keys) for _ in q]
        bounds = [[0.0] * (len(keys) // page) for _ in q]
        for row, query in enumerate(q):
            for g in range(groups):
                vector = query[head * groups + g]
                raw = [sum(a * b for a, b in zip(vector, key[head], strict=True)) / len(vector) ** 0.5 for key in keys]
                weights = torch.tensor(raw, dtype=torch.float64).softmax(0).tolist()
                shares[row] = [a + b / groups for a, b in zip(shares[row], weights, strict=True)]
                for place in range(len(bounds[row])):
                    paged = [key[head] for key in keys[place * page : (place + 1) * page]]
                    most = sum(
                        max(x * value for value in column)
                        for x, column in zip(vector, zip(*paged, strict=True), strict=True)
                    )
                    bounds[row][place] += most / groups

        def top(scores: list[float], count: int) -> set[int]:
            return set(sorted(range(len(scores)), key=lambda index: -scores[index])[:count])

        def summed(rows: list[list[float]]) -> list[float]:
            return [sum(column) for column in zip(*rows, strict=True)]

        own = [top(row, k) for row in shares]
        oracle = top(summed(shares), k)

        def served(sets: list[set[int]], own: list[set[int]] = own) -> float:
            return sum(len(a & b) for a, b in zip(sets, own, strict=True)) / k / len(own)

        def spread(pages: set[int]) -> set[int]:
            return {place * page + within for place in pages for within in range(page)}

        count = max(k // page, 1)
        found.setdefault("oracle", []).append(served([oracle] * len(q)))
        found.setdefault(f"quest {page}", []).append(served([spread(top(summed(bounds), count))] * len(q)))
        found.setdefault(f"quest {page}, per token", []).append(served([spread(top(row, count)) for row in bounds]))
        found.setdefault("union", []).append(len(set().union(*own)) / k)
        if first is not None:
            found.setdefault("mage", []).append(served([first[head]] * len(q)))
            found.setdefault("recall", []).append(len(first[head] & oracle) / k)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_measures_are_those_of_the_paper_by_words(seed: int) -> None:
    rng, generator = Random(seed), torch.Generator().manual_seed(seed)
    kv_heads, group, size, page = rng.choice((1, 2)), rng.choice((1, 2, 3)), rng.choice((2, 5)), rng.choice((2, 4))
    rows, prefix = rng.randint(1, 5), page * rng.randint(3, 7)
    k = rng.randint(1, prefix)
    q = torch.randn(rows, kv_heads * group, size, generator=generator) * 2
    keys = torch.randn(prefix, kv_heads, size, generator=generator)
    sets = [set(rng.sample(range(prefix), k)) for _ in range(kv_heads)] if seed % 2 else None
    first = None
    if sets is not None:
        first = torch.zeros(kv_heads, prefix, dtype=torch.bool)
        for head, chosen in enumerate(sets):
            first[head, sorted(chosen)] = True
    found, oracle = measures(q, keys, k, first, (page,))
    expected = by_words(q.double().tolist(), keys.double().tolist(), k, page, sets)
    assert union_sizes(q, keys, k).tolist() == pytest.approx(expected.pop("union"))
    assert set(found) == set(expected) and oracle.sum(1).tolist() == [k] * kv_heads
    for name, values in expected.items():
        assert found[name].tolist() == pytest.approx(values), name


def test_answers_are_followed_as_they_were_decoded_and_a_whole_budget_serves_all() -> None:
    with mosaic.compile(CONFIG, device="cpu", host_budget=0, seed=3) as model:
        generator = torch.Generator().manual_seed(7)
        for name, view in model.weights().items():
            if not name.startswith("="):
                vector = view.dim() == 1
                view.copy_(torch.empty(view.shape).normal_(1.0 if vector else 0.0, 0.4, generator=generator))
        arch, prompt, records = model.architecture, torch.arange(5, 75), Records()
        config = GenerationConfig(gen_length=40, remasking="low_confidence_static", steps=3)
        (answer,) = generate(model, [prompt], recording(config, arch, records))
        plain, at = Plain(model.weights(), arch), -1
        for step, (start, tokens) in zip(records[0], canvases(prompt, records[0], arch.block, MASK), strict=True):
            if start != at:
                plain.prefill(tokens[:start])
                at = start
            queries, logits = plain.block(tokens[start:])
            assert len(queries) == 2 and queries[0].shape == (32, 4, 8)
            assert logits.argmax(-1)[step.positions - start].tolist() == step.token_ids.tolist()
        kept = torch.cat([prompt, answer.token_ids])[:at]
        assert tokens[:at].tolist() == kept.tolist() and plain.keys[0].shape == (at, 2, 8)
        options = {"remasking": "low_confidence_static", "steps": 3}
        asked = EstimationSettings(ratios=(1.0, 0.1), tasks=("retrieval",), lengths=(128,), items=1, options=options)
        shown: list[tuple[int, int]] = []
        found = json.loads(json.dumps(estimate(model, asked, progress=lambda *now: shown.append(now))))
    assert shown == [(1, 1)]
    whole, some = (
        {name: value for name, value in found["later"][ratio].items() if not name.startswith("quest")}
        for ratio in ("1", "0.1")
    )
    assert set(whole.values()) == {1.0} and set(found["unions"]["1"]) == {1.0}
    assert min(some.values()) > 0 and max(some.values()) < 1 and max(found["unions"]["0.1"]) > 1
    assert set(found["by_head"]["0.1"]) == {"0", "1"} and set(found["by_head"]["0.1"]["0"]) == {"0", "1"}
    assert set(found["by_task"]["0.1"]) == {"retrieval"} and all(
        0 <= float(left) <= 1 for left in found["recall"]["0.1"]
    )
    pytest.importorskip("matplotlib")
    from benchmarks.quality.plot import estimation_png

    assert estimation_png(found, "title").startswith(b"\x89PNG")


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(UsageError, match=r"in \(0, 1\], got 0.5, 2"):
        EstimationSettings(ratios=(0.5, 2))
    with pytest.raises(UsageError, match="at least one answer"):
        EstimationSettings(items=0)
