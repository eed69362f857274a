"""A user's own operator, written as a newcomer would: it plans, is checked, runs under poison, and tests itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mosaic
from mosaic import Graph, Implementation, Operator, Plan, check_plan
from mosaic.devices import load_device
from mosaic.errors import GraphError, PlanFormatError, UnknownName, UsageError
from mosaic.planner.check import unverified_operators
from mosaic.registrar.operator import Attrs, Specs
from mosaic.registrar.operators import operator
from mosaic.registrar.serialize import from_json, to_json
from mosaic.runtime.executor import Executor
from mosaic.runtime.workspace import Workspace
from mosaic.testing import OperatorMismatch, verify_operator

# y[t] = x[t] * weight + (first row + t): what a kernel has to know of the whole, and scratch, in one.


def launch(*, x: Tensor, weight: Tensor, y: Tensor, gain: float, scratch: Tensor, row_start: int = 0) -> None:
    rows = scratch.view(torch.float32)[: x.shape[0]]
    torch.arange(row_start, row_start + x.shape[0], out=rows)
    torch.mul(x, weight, out=y)
    y.mul_(gain).add_(rows[:, None])


def reference(*, x: Tensor, weight: Tensor, gain: float) -> Tensor:
    return x * weight * gain + torch.arange(x.shape[0])[:, None]


def row_bytes(specs: Specs, attrs: Attrs) -> Any:
    return 4 * specs["x"].shape[0]


PLAIN = Implementation(backend="cpu", kernel=launch, scratch=row_bytes, row_origin="x")
NUMBERED = Operator(
    name="numbered", operands="x:a[T, F] weight:a[F] -> y:a[T, F]", attrs="gain", inplace=(("y", "x"),),
    implementations=(PLAIN,), reference=reference, roles={"x": "hidden", "y": "hidden"},
)  # fmt: skip
SIZES = {"T": 37, "F": 6}


def build(g: Graph, rule: Operator = NUMBERED) -> None:
    tokens = g.dim("tokens")
    x = g.input("x", (tokens, 6), "float32")
    weight = g.input("weight", (6,), "float32")
    h = g.add_op("copy", x)
    out = g.output("y", (tokens, 6), "float32")
    with g.chunk("rows", over=tokens, tile=8):
        g.add_op(rule, g.add_op(rule, h, weight, gain=0.5, name="first"), weight, gain=2.0, out=out, name="second")


def ran(plan: Any, **more: Any) -> tuple[Tensor, Tensor]:
    """The actual and expected results of a poisoned step of a plan."""
    document = getattr(plan, "document", plan)
    generator = torch.Generator().manual_seed(3)
    with Workspace() as workspace:
        for pool in document["pools"]:
            if pool["capacity"]:
                workspace.resize(pool["name"], pool["capacity"])
        executor = Executor(plan, workspace, debug="poison", **more)
        values = {name: torch.randn(view.shape, generator=generator) for name, view in executor.inputs.items()}
        for name, view in executor.inputs.items():
            view.copy_(values[name])
        executor.run()
        found = executor.outputs["y"].clone()
    x, weight = values["x"], values["weight"]
    return found, reference(x=reference(x=x, weight=weight, gain=0.5), weight=weight, gain=2.0)


@pytest.mark.parametrize("rows", [None, 8, 16])
def test_an_operator_of_ones_own_plans_is_checked_and_runs(rows: int | None) -> None:
    plan = mosaic.plan_graph(build, dims={"tokens": 37}, device="cpu", config={"rows": rows})
    assert plan.config["rows"] == rows
    assert plan.check() == ("numbered",) == unverified_operators(plan.document)
    found, expected = ran(plan)
    torch.testing.assert_close(found, expected)


def test_a_file_brings_no_operators_and_names_none_to_import() -> None:
    plan = mosaic.plan_graph(build, dims={"tokens": 37}, device="cpu")
    read = Plan.from_json(plan.to_json())
    with pytest.raises(PlanFormatError, match=r"op 1 \(first\) is of the operator 'numbered'.*operators=\{'numbered'"):
        ran(read)
    torch.testing.assert_close(*ran(read, operators={"numbered": NUMBERED}))
    for name in ("os", "mosaic.kernels.copy", "../copy", "_tiles"):
        document = json.loads(plan.to_json().replace('"numbered"', json.dumps(name)))
        with pytest.raises(PlanFormatError, match="does not ship"):
            ran(document)


def test_without_an_implementation_it_is_planned_and_says_why_it_cannot_run() -> None:
    bare = replace(NUMBERED, implementations=())
    plan = mosaic.plan_graph(lambda g: build(g, bare), dims={"tokens": 37}, device="cpu")
    assert plan.check() == ("numbered",)
    with pytest.raises(PlanFormatError, match=r"op 1 \(first\) cannot run.*implementation of numbered on cpu"):
        ran(plan)


def test_the_cheapest_implementation_that_serves_is_named_and_runs() -> None:
    """A product of no use to few rows: its rate grows with them; memory bounds the other."""
    calls: list[str] = []

    def watched(name: str) -> Any:
        def launcher(**operands: Any) -> None:
            calls.append(name)
            launch(**operands)

        return launcher

    ways = (
        replace(
            PLAIN, name="product", kernel=watched("product"), rate="gemm", serves=lambda s, a: s["x"].shape[0] != 38
        ),
        replace(PLAIN, name="plain", kernel=watched("plain")),
    )
    rule = replace(NUMBERED, implementations=ways, flops="100*x")

    def plan(tokens: int, rates: Mapping[int, float]) -> Plan:
        card = replace(load_device("cpu"), gemm_rates={1: rates}, bandwidth=1e9)
        found = mosaic.plan_graph(lambda g: build(g, rule), dims={"tokens": tokens}, device=card)
        assert found.check() == ("numbered",)
        torch.testing.assert_close(*ran(found))
        assert set(calls) == {found.document["implementations"]["numbered"]}
        calls.clear()
        return found

    slow, fast = {1: 1e6, 64: 1e6}, {1: 1e14, 64: 1e14}
    assert plan(37, slow).document["implementations"] == {"numbered": "plain"}
    assert plan(37, fast).document["implementations"] == {"numbered": "product"}  # as fast, and the first
    assert plan(38, fast).document["implementations"] == {"numbered": "plain"}  # the only one that serves


def test_a_graph_comes_back_with_the_operators_that_are_given() -> None:
    g = Graph("own", backend="cpu")
    build(g)
    back = from_json(to_json(g), operators={"numbered": NUMBERED})
    assert back.ops[1].operator is NUMBERED and to_json(back) == to_json(g)
    assert from_json(to_json(g)).ops[1].operator.implementations == ()


def test_one_name_is_one_operator() -> None:
    g = Graph("twice", backend="cpu")
    build(g)
    with g.scope("again"), pytest.raises(GraphError, match=r"test_operators\.py:\d+\): another operator of this graph"):
        build(g, replace(NUMBERED, rate="gemm"))


# -- tests that an operator brings of itself -------------------------------------------------------------------------


def test_an_operator_that_does_what_it_says_is_verified() -> None:
    assert verify_operator(NUMBERED, SIZES, loops="T", attrs={"gain": 0.5}) == ("cpu",)


def writes_beyond(**operands: Any) -> None:
    launch(**operands)
    y = operands["y"]
    y.as_strided((1,), (1,), y.storage_offset() + y.numel() + 3).fill_(1.0)


def changes_weight(**operands: Any) -> None:
    launch(**operands)
    operands["weight"].add_(1.0)


def forgets_the_row(**operands: Any) -> None:
    launch(**operands | {"row_start": 0})


def reads_after_writing(**operands: Any) -> None:
    x, y = operands["x"], operands["y"]
    y.zero_()
    launch(**operands | {"x": x})


def overruns_its_scratch(*, scratch: Tensor, **operands: Any) -> None:
    launch(scratch=scratch, **operands)
    scratch.as_strided((1,), (1,), scratch.storage_offset() + scratch.numel()).zero_()


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (lambda **o: launch(**o | {"gain": o["gain"] * 1.001}), "'cpu' of 'numbered', whole: y is off by"),
        (lambda **o: None, "whole: y is off by nan"),
        (writes_beyond, "whole: writes outside of y"),
        (changes_weight, "whole: changes weight"),
        (reads_after_writing, "whole, y over x: y is off"),
        (forgets_the_row, "in slices of T: y is off"),
        (overruns_its_scratch, "writes outside of scratch"),
    ],
)
def test_one_that_does_not_is_found_out(kernel: Any, message: str) -> None:
    wrong = replace(NUMBERED, implementations=(replace(PLAIN, kernel=kernel),))
    with pytest.raises(OperatorMismatch, match=message):
        verify_operator(wrong, SIZES, loops="T", attrs={"gain": 0.5})


def test_bits_that_depend_on_the_number_of_rows_are_found_out() -> None:
    def kernel(**o: Any) -> None:
        launch(**o)
        o["y"].mul_(1.0 + 2.0**-22 * (o["y"].shape[0] % 2))

    close = replace(NUMBERED, implementations=(replace(PLAIN, kernel=kernel),))
    assert verify_operator(close, SIZES, loops="T", attrs={"gain": 0.5}) == ("cpu",)
    claims = replace(NUMBERED, implementations=(replace(PLAIN, kernel=kernel, invariant=True),))
    with pytest.raises(OperatorMismatch, match="in slices of T: y has other bits than in one launch"):
        verify_operator(claims, SIZES, loops="T", attrs={"gain": 0.5})
    honest = replace(NUMBERED, implementations=(replace(PLAIN, invariant=True),))
    assert verify_operator(honest, SIZES, loops="T", attrs={"gain": 0.5}) == ("cpu",)


def test_what_cannot_be_verified_is_refused() -> None:
    with pytest.raises(UsageError, match="no implementation on cuda"):
        verify_operator(NUMBERED, SIZES, loops="T", attrs={"gain": 0.5}, backend="cuda")
    with pytest.raises(UsageError, match="has no reference"):
        verify_operator(replace(NUMBERED, reference=None), SIZES, loops="T", attrs={"gain": 0.5})
    with pytest.raises(UsageError, match="needs sizes for T"):
        verify_operator(NUMBERED, {"F": 3}, attrs={"gain": 0.5})
    with pytest.raises(GraphError, match=r"operand 'x' is float64\[2\], expected float64\[T, F\]"):
        verify_operator(
            NUMBERED, SIZES, loops="T", attrs={"gain": 0.5}, values={"x": torch.zeros(2, dtype=torch.float64)}
        )


@pytest.mark.parametrize(
    ("name", "sizes", "more"),
    [
        ("silu_mul", {"F": 37}, {"loops": "F", "dtypes": {"a": "bfloat16"}}),
        ("rms_norm", {"T": 37, "D": 24}, {"loops": "T", "attrs": {"eps": 1e-5}}),
        ("linear", {"T": 37, "I": 32, "O": 48}, {"loops": "T"}),
        ("copy", {"T": 37}, {"loops": "T", "dtypes": {"a": "int64"}}),
        (
            "attention", {"T": 37, "S": 37, "G": 2, "K": 2, "B": 2},
            {
                "loops": "T", "attrs": {"head_size": 8, "scale": 0.3, "span": 20},
                "values": {"cu_seqlens": torch.tensor([0, 9, 37]).int()},
            },
        ),
    ],
)  # fmt: skip
def test_shipped_operators_verify(name: str, sizes: dict[str, int], more: dict[str, Any]) -> None:
    assert verify_operator(operator(name), sizes, **more) == ("cpu",)


# -- records -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rate": "warp"}, UnknownName, "rate"),
        ({"roles": {"x": "decoration"}}, UnknownName, "role"),
        ({"roles": {"z": "hidden"}}, GraphError, "something of z"),
        ({"operands": "x:a[T] -> y"}, GraphError, "operands are written as"),
        ({"moved": {"z": "1"}}, GraphError, "something of z"),
        ({"implementations": (PLAIN, PLAIN)}, GraphError, "two implementations of one name"),
        ({"implementations": (replace(PLAIN, serves=lambda s, a: True),)}, GraphError, "none on cpu serves every"),
        ({"implementations": (replace(PLAIN, row_origin="z"),)}, GraphError, "something of z"),
        ({"implementations": (replace(PLAIN, on_host=frozenset({"z"})),)}, GraphError, "something of z"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        replace(NUMBERED, **changes)


def test_scratch_is_enough_for_every_implementation() -> None:
    def scratch(size: Any) -> Any:
        return lambda specs, attrs: size

    g = Graph("sizes")
    n, m = g.dim("n"), g.dim("m")
    for sizes, expected in (((3, 7), 7), ((n, n * n + 2 * n), n * n + 2 * n), ((5 * n, n), 5 * n), ((n, m), n + m)):
        ways = tuple(replace(PLAIN, name=str(i), scratch=scratch(size)) for i, size in enumerate(sizes))
        assert replace(NUMBERED, implementations=ways).scratch_bytes("cpu", {}, {}) == expected
    assert replace(NUMBERED, implementations=(PLAIN, replace(PLAIN, name="b", inplace=()))).inplace_on("cpu") == ()
    assert NUMBERED.inplace_on("cpu") == NUMBERED.inplace_on("cuda") == (("y", "x"),)


def test_the_checker_judges_choices_of_shipped_operators_alone() -> None:
    document = json.loads(mosaic.plan_graph(build, dims={"tokens": 37}, device="cpu").to_json())
    assert check_plan(document | {"implementations": {"numbered": "plain"}}) == []
    for chosen in ({"copy": "cpu"}, {"elsewhere": "plain"}):
        assert [v.code for v in check_plan(document | {"implementations": chosen})] == [
            "implementation",
            "implementation",
        ]
