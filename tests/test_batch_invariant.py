"""Plans that are asked to be batch-invariant: what they may choose, what they say of it, and what the checker makes of that."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from test_decoding import CONFIGS

from mosaic.devices import load_device
from mosaic.errors import GraphError
from mosaic.models import load
from mosaic.planner import Plan, Planner, Request
from mosaic.planner.check import check_plan as check
from mosaic.planner.compiling import compile_body
from mosaic.planner.cost import OpTimes
from mosaic.registrar.graph import Graph

LARGE = Request(seq_lens=(4096, 512))


def planned(**options: Any) -> Plan:
    return Planner(load(CONFIGS["llada"]).with_dtype("bfloat16"), device="h200", **options).plan(LARGE, limit=False)


def test_the_plan_takes_invariant_kernels_and_choices_alone() -> None:
    plain, alone = planned().document, planned(batch_invariant=True).document
    assert "batch_invariant" not in plain and alone["batch_invariant"] is True
    assert plain["implementations"] == {"attention": "triton"}
    assert alone["implementations"] == {"attention": "triton", "linear": "invariant", "linear_add": "invariant"}
    assert alone["config"]["head"] == "logits"
    single = Planner(load(CONFIGS["llada"]).with_dtype("bfloat16"), device="h200", batch_invariant=True)
    assert single.plan(Request(seq_lens=(512,)), limit=False).document["implementations"]["attention"] == "triton"
    assert not check(alone)


def test_on_a_cpu_every_kernel_will_do() -> None:
    document = Planner(load(CONFIGS["llada"]), device="cpu", batch_invariant=True).plan(LARGE, limit=False).document
    assert document["batch_invariant"] is True and document["implementations"] == {} and not check(document)


@pytest.mark.parametrize("kernel, name", [("linear", None), ("linear_add", "cublas"), ("attention", "cudnn")])
def test_a_plan_that_claims_it_with_another_kernel_is_refused(kernel: str, name: str | None) -> None:
    document = deepcopy(planned(batch_invariant=True).document)
    if name is None:
        del document["implementations"][kernel]
    else:
        document["implementations"][kernel] = name
    assert any(f"batch-invariant: {kernel} has to be" in str(found) for found in check(document))


def test_a_plan_that_claims_it_with_a_kernel_that_never_is_is_refused() -> None:
    document = (
        Planner(load(CONFIGS["llada"]).with_dtype("bfloat16"), device="h200")
        .plan(LARGE, limit=False, config={"head": "fused"})
        .document
    )
    document = {**deepcopy(document), "batch_invariant": True}
    assert any("batch-invariant, unembed_stats is not" in str(found) for found in check(document))


def test_an_operator_without_an_invariant_implementation_is_named() -> None:
    g = Graph("head")
    rows = g.dim("rows")
    x, weight = g.input("x", (rows, 64), "bfloat16"), g.weight("w", (512, 64), "bfloat16")
    g.add_op("unembed_stats", x, weight)
    with pytest.raises(GraphError, match="cannot take 'unembed_stats'"):
        OpTimes(compile_body(g), load_device("h200"), batch_invariant=True)


@pytest.mark.parametrize("claim", [1, None, "yes"])
def test_the_claim_is_a_boolean(claim: Any) -> None:
    document = {**planned(batch_invariant=True).document, "batch_invariant": claim}
    assert any("batch_invariant: expected a boolean" in str(found) for found in check(document))
