"""A weight has one address per model and residency, whatever a step chooses, and a plan that has it elsewhere is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import test_parity_block
import test_runtime_compiled
import torch
from covering import some_of
from test_runtime_compiled import sequences_of

import mosaic
from mosaic.errors import WeightsMisplaced
from mosaic.models.parts import GUIDED, KEPT, LOGITS, NO_HEAD, NUCLEUS, SAMPLE, Commit
from mosaic.models.phase import FULL_STEP, Phase
from mosaic.planner import Planner, Request
from mosaic.planner.check import weight_map
from mosaic.planner.custom import plan_graph
from mosaic.planner.plan import Plan
from mosaic.registrar.graph import Graph
from mosaic.runtime.executor import Executor
from mosaic.runtime.workspace import Workspace

CONFIGS: dict[str, Mapping[str, Any]] = {
    **{name: config for name, (config, _) in test_runtime_compiled.FAMILIES.items()},
    **{name: config for name, (config, _) in test_parity_block.FAMILIES.items()},
}
PHASES = [
    FULL_STEP,
    Phase(logits=LOGITS),
    Phase(commit=Commit(score="margin", rule="top")),
    Phase(head=SAMPLE, commit=Commit(score="entropy", rule="top"), guidance=GUIDED),
    Phase(cache=KEPT),
    Phase(cache=KEPT, head=NO_HEAD),
    Phase(cache=KEPT, head=NUCLEUS, commit=Commit(score="confidence", rule="dynamic", perturb=True)),
    Phase(cache=KEPT, head=SAMPLE, commit=Commit(score="confidence", rule="threshold")),
]
HOST_BYTES = 1 << 30


def steps_of(phase: Phase) -> Iterator[Request]:
    """A short step of a phase and a longer one of two sequences."""
    for lengths in ((5,), (140, 300)):
        keys = tuple(n + 30 for n in lengths) if phase.cached else ()
        rows = {} if not phase.head.decides else {"masked": 3}
        yield Request(seq_lens=lengths, key_lens=keys, phase=phase, logit_rows=2 if phase.logits else 0, **rows)


def plans_of(planner: Planner) -> Iterator[Plan]:
    """Plans of all phases, in every option of every choice and in chunks or none."""
    for phase in PHASES:
        template = planner.space(phase).template
        options = {choice.name: choice.options for choice in template.choices if choice.name != "stream"}
        for number, choices in enumerate(some_of(options, 3, f"{planner.model.name} {phase}")):
            chunks: dict[str, int | None] = {"proj": 128, "ffn": 128, "experts": 128, "logits": 64, "heads": 1}
            known = {knob.name for knob in template.knobs}
            for request in steps_of(phase):
                rows = {name: value for name, value in chunks.items() if name in known and number % 2}
                stream = random.Random(number).choice(("none", "layers", "50%"))
                plan = planner.plan(request, config={**choices, **rows, "stream": stream}, limit=False)
                assert choices.items() <= plan.config.items() and plan.config["stream"] == stream
                yield plan


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "llada2" else pytest.mark.soak) for name in CONFIGS]
)
def test_every_phase_and_configuration_has_the_weights_at_the_same_addresses(family: str) -> None:
    planner = Planner(mosaic.models.load(CONFIGS[family]), device="cpu", host_budget=HOST_BYTES)
    maps: dict[str, Mapping[str, Any]] = {}
    for plan in plans_of(planner):
        first = maps.setdefault(str(plan.config["stream"]), plan.weights)
        assert plan.weights == first and len(first) > 10
        assert weight_map(plan.document) == first
    assert len(maps) == 3 and len({frozenset(found.items()) for found in maps.values()}) == 3


def test_a_plan_says_where_its_weights_lie() -> None:
    def build(g: Graph) -> None:
        x = g.input("x", (g.dim("tokens"), 3), "float32")
        y = g.add_op("linear", x, g.weight("late", (3, 3), "float32", tensor="layers.10.w"))
        g.add_op("linear", y, g.weight("early", (200, 3), "float32", tensor="layers.9.w"))

    plan = plan_graph(build, dims={"tokens": 4}, device="cpu")
    assert plan.weights == {"layers.9.w": ("weights", 0, 2560), "layers.10.w": ("weights", 2560, 512)}


def test_graphs_of_a_program_may_name_their_weights_in_any_order() -> None:
    shapes = {"a": (8, 8), "b": (8, 8), "c": (8, 8)}

    def build(g: Graph, names: str) -> None:
        h = g.input("x", (g.dim("tokens"), 8), "float32")
        for name in names:
            h = g.add_op("linear", h, g.weight(name, shapes[name], "float32", tensor=name))

    maps = [plan_graph(lambda g, n=names: build(g, n), dims={"tokens": 7}, device="cpu").weights
            for names in ("abc", "cab", "bca")]  # fmt: skip
    assert maps[0] == maps[1] == maps[2]


# --- steps --------------------------------------------------------------------------------------------------------------


def budgets_by_attention(planner: Planner, request: Request) -> dict[str, int]:
    """The largest budget at which the planner takes each way of attention by itself."""
    found: dict[str, int] = {}
    pages = planner.device.page_bytes
    for budget in range(planner.plan(request).total_bytes, planner.needed(request) - 1, -pages):
        tight = Planner(planner.model, device=planner.device, budget=budget, host_budget=0)
        found.setdefault(str(tight.plan(request, limit=False).config["attention"]), budget)
    return found


def test_whatever_attention_a_budget_asks_for_the_step_is_the_same() -> None:
    """Dream with biases that matter: q, k and v ones are registered in another order where queries go by chunks."""
    config = {**CONFIGS["dream"], "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
    ids, rows = sequences_of((257,), config)[0], torch.arange(257)
    request = Request(seq_lens=(257,), masked=257, logit_rows=257)
    planner = Planner(mosaic.models.load(config), device="cpu", host_budget=0)
    budgets = budgets_by_attention(planner, request)
    assert set(budgets) == {"together", "queries", "heads"}
    expected: torch.Tensor | None = None
    for attention, budget in budgets.items():
        with mosaic.compile(config, budget=budget, host_budget=0, debug="poison") as model:
            generator = torch.Generator().manual_seed(7)
            for name, view in sorted(model.weights().items()):
                if not name.startswith("="):
                    view.normal_(1.0 if "norm" in name else 0.0, 0.12, generator=generator)
            step = model(ids, rows, logits_for=rows)
            assert step.plan.config["attention"] == attention and step.plan.total_bytes <= budget
            assert step.logits is not None
            expected = step.logits.clone() if expected is None else expected
            scale = float(expected.abs().max())
            assert float((step.logits - expected).abs().max()) <= 1e-5 * scale, attention


# --- binding ------------------------------------------------------------------------------------------------------------


def two_linears(g: Graph, names: str = "ab") -> None:
    """Two products, the first of 200 columns, whose weights have these names."""
    tokens = g.dim("tokens")
    x, y = g.input("x", (tokens, 200), "float32"), g.output("y", (tokens, 8), "float32")
    h = g.add_op("linear", x, g.weight("first", (200, 200), "float32", tensor=names[0]))
    g.add_op("linear", h, g.weight("second", (8, 200), "float32", tensor=names[1]), out=y)


def test_binding_refuses_a_plan_whose_weights_lie_elsewhere() -> None:
    loaded, other = (
        plan_graph(lambda g, n=names: two_linears(g, n), dims={"tokens": 4}, device="cpu") for names in ("ab", "ba")
    )
    with Workspace() as workspace:
        for pool in ("workspace", "weights"):
            workspace.resize(pool, 1 << 20)
        Executor(loaded, workspace, weights=loaded.weights)
        elsewhere = r"2 of the plan's 2 weights .* 'b' .* at weights \+ 6,656 .* lies at weights \+ 160,256"
        with pytest.raises(WeightsMisplaced, match=elsewhere) as refused:
            Executor(other, workspace, weights=loaded.weights)
        assert set(refused.value.tensors) == {"a", "b"}
        with pytest.raises(WeightsMisplaced, match=r"1 of .* 'b' .* is not loaded") as refused:
            Executor(loaded, workspace, weights={"a": loaded.weights["a"]})
        assert refused.value.tensors == ("b",)
