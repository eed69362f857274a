"""What is made for one card alone is named by plans for such cards, refused by the checker and at binding elsewhere."""

from __future__ import annotations

import importlib.util
import logging
import sys
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from stream_log import StreamLog

from mosaic.devices import DEVICES, Device, load_device
from mosaic.errors import PlanFormatError, UsageError
from mosaic.planner.check import check_plan
from mosaic.planner.planner import Planner
from mosaic.registrar.bucketed import ProgramStep
from mosaic.registrar.graph import Graph
from mosaic.registrar.program import Program
from mosaic.runtime.executor import Executor
from mosaic.runtime.opening import usable_device
from mosaic.runtime.workspace import Workspace

DIMS = {"tokens": 32, "kv_rows": 5000, "keys": 4000, "seqs": 1, "span": 4000, "extents": 3}
HOPPER = ["h100", "h200"]


def attending(operator: str = "kv_attention", *, size: int = 128, dtype: str = "bfloat16") -> Program:
    """Two query heads on one KV head, over what a state keeps."""

    def build(g: Graph) -> None:
        tokens, rows, keys, seqs, span, extents = (g.dim(name) for name in DIMS)
        kv, q = g.state("kv", (rows, 2 * size), dtype), g.input("q", (tokens, 2 * size), dtype)
        where = g.input("extents", (extents, 4), "int64"), g.input("cu_extents", (seqs + 1,), "int32")
        bounds = g.input("seen", (seqs,), "int32"), g.input("cu_seqlens", (seqs + 1,), "int32")
        outputs = [g.output("y", (tokens, 2 * size), dtype)]
        if operator == "prefix_attention":
            outputs.append(g.output("logsumexp", (tokens, 2), "float32"))
        attrs = {"layer": 0, "kv_heads": 1, "head_size": size, "scale": 1.0, "span": span, "keys": keys}
        out = tuple(outputs) if len(outputs) > 1 else outputs[0]
        g.add_op(operator, q, kv, *where, *bounds, g.input("positions", (tokens,), "int32"), out=out, **attrs)

    program = Program("attending")
    program.add_phase("attending", build)
    return program


def planned(device: Device | str, operator: str = "kv_attention", *, invariant: bool = False, **options: Any) -> Any:
    planner = Planner(attending(operator, **options), device=device, batch_invariant=invariant)
    return planner.plan(ProgramStep(name="attending", sizes=DIMS)).document


@pytest.mark.parametrize("operator", ["kv_attention", "prefix_attention"])
@pytest.mark.parametrize("device", [name for name, card in DEVICES.items() if card.backend == "cuda"])
def test_plans_name_the_kernel_for_hopper_on_hopper_alone(device: str, operator: str) -> None:
    plain, fixed = planned(device, operator), planned(device, operator, invariant=True)
    on_hopper = device in HOPPER
    assert plain["implementations"] == {operator: "hopper" if on_hopper else "triton"}
    assert fixed["implementations"] == {operator: "hopper_invariant" if on_hopper else "invariant"}
    assert plain["capability"] == load_device(device).capability and check_plan(plain) == check_plan(fixed) == []


@pytest.mark.parametrize("options", [{"size": 32}, {"size": 256}, {"dtype": "float32"}, {"dtype": "float16"}], ids=str)
def test_what_the_kernel_for_hopper_does_not_take_has_the_plain_one(options: dict[str, Any]) -> None:
    plain, fixed = planned("h200", **options), planned("h200", invariant=True, **options)
    assert [found["implementations"]["kv_attention"] for found in (plain, fixed)] == ["triton", "invariant"]
    for document, name in ((plain, "hopper"), (fixed, "hopper_invariant")):
        document["implementations"] = {"kv_attention": name}
        assert any("hopper takes bfloat16 and heads of 64 or 128" in str(found) for found in check_plan(document))


def test_the_kernel_for_hopper_costs_what_the_plain_one_does() -> None:
    """Profiles have one rate for both, so that the first of two equally fast ones is taken."""
    plain = planned(replace(load_device("h200"), capability=0))
    assert (
        "capability" not in plain and plain["implementations"] == {"kv_attention": "triton"} and not check_plan(plain)
    )
    same = planned("h200")
    assert same["predicted_step_ms"] == plain["predicted_step_ms"] and same["total_bytes"] == plain["total_bytes"]


@pytest.mark.parametrize("card", [None, 80, 100, 900])
def test_a_plan_that_names_it_for_another_card_is_refused(card: int | None) -> None:
    for invariant, name in ((False, "hopper"), (True, "hopper_invariant")):
        document = deepcopy(planned("h100", invariant=invariant))
        document.pop("capability")
        if card is not None:
            document["capability"] = card
        text = f"kv_attention by '{name}' needs a card of compute capability 90, got {card or 0}"
        assert [found.message for found in check_plan(document)] == [text]


@pytest.mark.parametrize("name", ["hopper", "hopper_invariant", "triton", "abacus"])
def test_a_batch_invariant_plan_names_none_but_the_invariant_ones(name: str) -> None:
    document = {**planned("h100", invariant=True), "implementations": {"kv_attention": name}}
    said = [found.message for found in check_plan(document)]
    assert any("has to be 'hopper_invariant' or 'invariant'" in text for text in said) == (name != "hopper_invariant")


def test_other_plans_name_no_invariant_one() -> None:
    document = {**planned("h100"), "implementations": {"kv_attention": "hopper_invariant"}}
    assert [found.message for found in check_plan(document)] == [
        "kv_attention has no 'hopper_invariant'; known: hopper, triton"
    ]


@pytest.mark.parametrize("capability", [-1, "90", True, 9.0])
def test_a_capability_is_a_number_from_zero(capability: object) -> None:
    with pytest.raises(UsageError, match="capability must be a number such as 90, or 0 for none"):
        replace(load_device("h100"), capability=capability)
    document = {**planned("h100"), "capability": capability}
    assert [found.message for found in check_plan(document)] == [
        f"capability: expected an integer from 0, got {capability!r}"
    ]


def test_a_plan_for_another_card_is_refused_when_it_is_bound() -> None:
    document = planned("h100")
    with Workspace() as workspace:
        for pool in ("workspace", "state/kv"):
            workspace.resize(pool, 1 << 22)
        with pytest.raises(
            PlanFormatError, match=r"'kv_attention' by 'hopper', which needs .* 90, this machine's is 0: plan for"
        ):
            Executor(document, workspace, streams=StreamLog())


triton_test = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@triton_test
@pytest.mark.parametrize(
    "card, version, expected", [((8, 0), "3.6.0", 80), ((9, 0), "3.6.0", 90), ((9, 0), "3.5.1", 0)], ids=str
)
def test_an_engine_plans_for_the_card_and_the_triton_that_it_finds(
    card: tuple[int, int],
    version: str,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever the profile says of the card."""
    import triton

    if not triton.__version__.startswith("3.6."):
        pytest.skip("the kernel for Hopper is written for Triton 3.6")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: card)
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.delitem(sys.modules, "mosaic.kernels.cuda.kv_attention_hopper", raising=False)
    for name in ("h200", "rtx-4090"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = usable_device(name)
        assert found.capability == expected
        slower = [text for text in caplog.messages if "attention over kept keys runs on the plain kernel" in text]
        assert bool(slower) == (expected == 0) and all(
            "is written for Triton 3.6, and 3.5.1 is installed" in text for text in slower
        )
