"""The moves that need host memory or groups of heads: same results, planned bytes, and in everybody's search."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

import mosaic
from mosaic.models import load
from mosaic.planner import Planner, Request
from mosaic.planner.check import check_plan
from mosaic.planner.search import brute_force, search, whole_grid
from mosaic.units import GIB, MIB

SMALL: dict[str, dict[str, Any]] = {
    "llada": {
        "model_type": "llada", "d_model": 64, "n_layers": 3, "n_heads": 4, "mlp_hidden_size": 96, "embedding_size": 160,
        "mask_token_id": 159, "torch_dtype": "float32",
    },
    "dream": {
        "model_type": "Dream", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 160, "mask_token_id": 159,
        "torch_dtype": "float32",
    },
    "llada-moe": {
        "architectures": ["LLaDAMoEModelLM"], "model_type": "llada", "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "expert_intermediate_size": 32, "num_experts": 4,
        "num_experts_per_tok": 2, "vocab_size": 160, "mask_token_id": 159, "torch_dtype": "float32",
    },
}  # fmt: skip
MOVES = {
    "attention": ("together", "queries", "heads"),
    "hidden": ("device", "host"),
    "stream": ("none", "50%", "layers"),
}
SETTINGS = [dict(zip(MOVES, chosen, strict=True)) for chosen in product(*MOVES.values())]


def run(config: dict[str, Any], settings: dict[str, Any], tokens: int, debug: Any = None) -> list[torch.Tensor]:
    ids = torch.arange(tokens) % 150
    ids[tokens // 3 :: 2] = config["mask_token_id"]
    with mosaic.compile(config, config=settings, host_budget="1GiB", debug=debug) as model:
        step = model(ids).clone()
        report = model.memory()
        assert report.planned == {**dict.fromkeys(report.planned, 0), **report.committed}
    return [step.token_ids, step.logsumexp, step.confidence, step.entropy]


@pytest.mark.soak  # the parity grids of the test command run every pair of these moves
@pytest.mark.parametrize("family", SMALL)
def test_every_move_gives_the_same_step(family: str) -> None:
    config = SMALL[family]
    expected = run(config, {}, 300)
    chunk = "experts" if family == "llada-moe" else "ffn"
    for settings in SETTINGS:
        rows = {"proj": 128, chunk: 128, "logits": 64, **({"heads": 1} if settings["attention"] == "heads" else {})}
        for debug in (None, "poison"):
            found = run(config, {**settings, **rows}, 300, debug)
            assert torch.equal(found[0], expected[0]), settings
            for a, b in zip(found[1:], expected[1:], strict=True):
                torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5, msg=str(settings))


@cache
def planner_of(family: str, device: str) -> Planner:
    return Planner(load(SMALL[family]), device=device, host_budget=GIB)


@pytest.mark.grid
@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize("attention", MOVES["attention"])
@pytest.mark.parametrize("hidden", MOVES["hidden"])
@pytest.mark.parametrize("stream", MOVES["stream"])
@pytest.mark.parametrize("rows", [{}, {"proj": 128, "logits": 64}, {"proj": 128, "heads": 2}], ids=str)
@pytest.mark.parametrize("lengths", [(1,), (300,), (100, 257)], ids=str)
def test_plans_of_every_move_are_valid(
    lengths: tuple[int, ...], rows: dict[str, int], stream: str, hidden: str, attention: str, family: str
) -> None:
    if family == "dream" and "heads" in rows:
        rows = {**rows, "heads": 1}
    settings: dict[str, Any] = {"attention": attention, "hidden": hidden, "stream": stream, **rows}
    plan = planner_of(family, "cpu").plan(Request(seq_lens=lengths), config=settings, limit=False)
    assert [str(v) for v in check_plan(plan.document)] == []
    assert plan.optimal or lengths == (1,)


@pytest.mark.parametrize(("tokens", "family"), [
    (3000, "llada"), (300, "dream"), (300, "llada-moe"),
    *(pytest.param(tokens, family, marks=pytest.mark.soak) for tokens, family in product((700, 3000), SMALL)
      if (tokens, family) != (3000, "llada")),
])  # fmt: skip
def test_the_search_finds_what_brute_force_finds(tokens: int, family: str) -> None:
    point = planner_of(family, "h200").space().at(Request(seq_lens=(tokens,)).size.dims())
    totals = sorted({point.total_bytes(config) for config in whole_grid(point)})
    for budget in (totals[0] - 1, totals[0], totals[len(totals) // 2], totals[-1]):
        for host in (0, MIB * 2, GIB):
            fast, full = search(point, budget, host), brute_force(point, budget, host)
            assert fast.fits == full.fits
            if fast.fits:
                assert fast.seconds <= full.seconds * 1.005**2
                assert point.fits(fast.config, budget, host)


@pytest.mark.soak
def test_more_host_memory_never_shortens_the_context() -> None:
    longest = [
        Planner("llada-8b", device="h200", budget=6 * GIB, host_budget=host * GIB).max_context(Request(seq_lens=(1,)))
        for host in (0, 8, 64)
    ]
    assert longest == sorted(longest) and longest[0] == 0 and longest[-1] > 1_000_000


@pytest.mark.parametrize(
    ("tokens", "budget", "host"),
    [
        pytest.param(32768, 4, 16, marks=pytest.mark.soak),
        pytest.param(131072, 6, 16, marks=pytest.mark.soak),
        pytest.param(524288, 12, 32, marks=pytest.mark.soak),
        pytest.param(1048576, 24, 32, marks=pytest.mark.soak),
        (1048576, 8, 64),
    ],
)
def test_long_contexts_on_small_cards(tokens: int, budget: int, host: int) -> None:
    planner = Planner("llada-8b", device="h200", budget=budget * GIB, host_budget=host * GIB)
    plan = planner.plan(Request(seq_lens=(tokens,)))
    assert plan.fits and plan.max_ctx_tokens >= tokens
    assert plan.peak_bytes <= plan.lower_bound_bytes * 1.01
    assert check_plan(plan.document) == []
