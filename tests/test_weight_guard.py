"""In debug mode a step that writes to a weight, or between weights, is caught and the weight named."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_runtime_compiled import LLADA, Module, weights_of

import mosaic
from mosaic.errors import WeightsChanged
from mosaic.planner.custom import plan_graph
from mosaic.registrar.graph import Graph
from mosaic.runtime.executor import Executor
from mosaic.runtime.weights import fill_randomly, weight_views
from mosaic.runtime.workspace import Workspace

SHAPES = {"layers.0.w": (5, 5), "layers.1.w": (200, 5), "norm": (5,)}
POOLS = ("workspace", "weights", "host")


def build(g: Graph) -> None:
    """A product of streamed weights, one of the device's, a norm; the result is small enough for any gap."""
    tokens = g.dim("tokens")
    x, y = g.input("x", (tokens, 5), "float32"), g.output("y", (tokens, 5), "float32")
    for name in ("host.0", "host.1"):
        there = g.buffer(f"{name}@host", (5, 5), "float32", kind="host", tensor=name)
        here = g.add_op("copy", there, out=g.buffer(name, (5, 5), "float32"), name=f"{name}_fetch")
        x = g.add_op("linear", x, here)
    weights = {name: g.weight(name, shape, "float32", tensor=name) for name, shape in SHAPES.items()}
    g.add_op("linear", x, weights["layers.1.w"])
    h = g.add_op("linear", x, weights["layers.0.w"])
    g.add_op("copy", g.add_op("rms_norm", h, weights["norm"], eps=1e-5), out=y)


@pytest.fixture
def document() -> dict[str, Any]:
    plan = plan_graph(build, dims={"tokens": 1}, device="cpu")
    return copy.deepcopy(dict(plan.document))


@pytest.fixture
def workspace(document: dict[str, Any]) -> Iterator[Workspace]:
    with Workspace() as opened:
        for pool in POOLS:
            opened.resize(pool, 1 << 16)
        fill_randomly(weight_views(document, opened))
        yield opened


def stray(document: dict[str, Any], pool: str, offset: int) -> dict[str, Any]:
    """The same plan with its result written elsewhere: what a plan that lies, or a kernel that strays, does."""
    (y,) = (record for record in document["buffers"] if record["name"] == "y")
    y["pool"], y["offset"] = pool, offset
    return document


def run(document: dict[str, Any], workspace: Workspace, debug: Any = "poison") -> None:
    executor = Executor(document, workspace, debug=debug)
    executor.inputs["x"].copy_(torch.tensor([[1.0, -2.0, 3.0, -4.0, 5.0]]))
    executor.run()


def test_a_step_that_keeps_to_its_buffers_passes(document: dict[str, Any], workspace: Workspace) -> None:
    before = {name: view.clone() for name, view in weight_views(document, workspace).items()}
    for _ in range(2):
        run(document, workspace)
    assert all(torch.equal(view, before[name]) for name, view in weight_views(document, workspace).items())


@pytest.mark.parametrize("name", [*SHAPES, "host.0", "host.1"])
def test_a_weight_that_a_kernel_writes_to_is_named(name: str, document: dict[str, Any], workspace: Workspace) -> None:
    pool, offset, _ = mosaic.Plan(document).weights[name]
    broken = stray(document, pool, offset)
    with pytest.raises(WeightsChanged, match=rf"wrote to weights, which it may only read: '{name}'\. ") as refused:
        run(broken, workspace)
    assert refused.value.tensors == (name,)
    run(broken, workspace, debug=None)  # and nobody looks without


def test_bytes_between_and_behind_weights_are_guarded(document: dict[str, Any], workspace: Workspace) -> None:
    """At places drawn at random: whatever is written to is named, a weight or the gap after it."""
    weights = mosaic.Plan(document).weights
    ends = {name: 4 * torch.Size(SHAPES.get(name, (5, 5))).numel() for name in weights}
    source, seen = random.Random(1), set[str]()
    for _ in range(80):
        name = source.choice(list(weights))
        pool, start, size = weights[name]
        end = ends[name]
        offset = source.randrange(*source.choice([(0, end - 19, 4), (end - 16, end, 4), (end, size - 20, 4)]))
        with pytest.raises(WeightsChanged) as refused:
            run(stray(copy.deepcopy(document), pool, start + offset), workspace)
        gap = f"the {size - ends[name]:,} bytes after '{name}'"
        if name == "norm":  # the last of its pool: all that is committed is behind it
            gap = f"the {(1 << 16) - start - ends[name]:,} bytes after '{name}'"
        wanted = {name} if offset + 20 <= ends[name] else {gap} if offset >= ends[name] else {name, gap}
        assert set(refused.value.tensors) == wanted, (name, offset)
        seen |= wanted
    assert len(seen) == 2 * len(weights)


def test_gaps_hold_poison_while_a_step_runs(document: dict[str, Any], workspace: Workspace) -> None:
    pool, start, size = mosaic.Plan(document).weights["layers.0.w"]
    workspace.view(pool, start + 100, (size - 100,), "uint8").zero_()
    run(document, workspace)
    assert (workspace.view(pool, start + 100, (size - 100,), "uint8") == 0xFF).all()


def test_weights_may_be_written_between_steps_and_adopted_ones_are_guarded() -> None:
    with mosaic.compile(LLADA, debug="poison") as model:
        first = model([1, 256, 3]).clone()
        model.weights()["model.transformer.ln_f.weight"].mul_(2.0)
        assert not torch.equal(model([1, 256, 3]).maximum, first.maximum)
        module = Module(LLADA, weights_of(model))
    with mosaic.compile(module, debug="poison") as adopted:
        assert adopted([1, 256, 3]).rows.tolist() == [1]
