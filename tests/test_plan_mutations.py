"""Real plans, broken in every way that we can think of: the checker rejects each mutant for a stated reason."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from plan_mutations import MUTATIONS
from plan_races import races

from mosaic.planner import Planner, Request
from mosaic.planner.check import check_plan

SMALL = {
    "model_type": "llada", "d_model": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "mlp_hidden_size": 96,
    "embedding_size": 257, "mask_token_id": 256, "torch_dtype": "float32",
}  # fmt: skip
CHUNKS = {"proj": 128, "ffn": 256, "logits": 64}
CONFIGURATIONS: list[dict[str, Any]] = [
    {"head": "logits", "attention": "together"},
    {"head": "logits", "attention": "together", **CHUNKS},
    {"head": "fused", "attention": "queries", "ffn": 128, "logits": 128},
    {"head": "logits", "attention": "queries", "stream": "50%", **CHUNKS},
    {"head": "fused", "attention": "queries", "hidden": "host", "stream": "none", **CHUNKS},
    {"head": "logits", "attention": "heads", "hidden": "host", "stream": "all", "heads": 1, **CHUNKS},
]
# These need explicit barriers or gaps, which no shipped model has; tests/test_check.py applies them.
ELSEWHERE = {"drop_explicit_barrier", "enlarge_gap"}


def small_plan(number: int) -> dict[str, Any]:
    from mosaic.models import load

    planner = Planner(load(SMALL), device="cpu" if number % 2 else "rtx-3090")
    request = Request(seq_lens=(400, 301), mask_ratio=0.5, logit_rows=7)
    return copy.deepcopy(dict(planner.plan(request, config=CONFIGURATIONS[number]).document))


@pytest.fixture(scope="module")
def plans() -> list[dict[str, Any]]:
    found = [small_plan(i) for i in range(len(CONFIGURATIONS))]
    found.append(dict(Planner("dream-7b", device="rtx-3090").plan(Request(seq_lens=(131072,))).document))
    assert [list(map(str, check_plan(document))) for document in found] == [[]] * len(found)
    return found


def test_real_plans_have_no_race(plans: list[dict[str, Any]]) -> None:
    """By unrolling every iteration of every loop."""
    assert [races(document) for document in plans[: len(CONFIGURATIONS)]] == [[]] * len(CONFIGURATIONS)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@pytest.mark.parametrize("mutation", sorted(MUTATIONS.keys() - ELSEWHERE))
@given(seed=st.integers(0, 1 << 30), number=st.integers(0, len(CONFIGURATIONS)))
def test_every_mutant_of_a_real_plan_is_rejected(
    mutation: str, plans: list[dict[str, Any]], seed: int, number: int
) -> None:
    broken = MUTATIONS[mutation](plans[number], random.Random(seed).choice)
    assume(broken is not None)
    assert broken is not None
    document, code = broken
    assert code in {violation.code for violation in check_plan(document)}


def test_all_other_mutations_apply_to_real_plans(plans: list[dict[str, Any]]) -> None:
    choice = random.Random(0).choice
    applies = {name for name, mutation in MUTATIONS.items() if any(mutation(p, choice) is not None for p in plans)}
    assert applies == MUTATIONS.keys() - ELSEWHERE
