"""No plan is handed out unproved: whatever packs its buffers, what comes out passes the checker or does not come out."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mosaic.errors import CheckFailed, UnsafePlan
from mosaic.models import load
from mosaic.models.parts import KEPT, NO_HEAD
from mosaic.models.phase import Phase
from mosaic.planner import Planner, Request, limits, plan, plan_graph, plan_program, planner
from mosaic.planner.check import check_plan, check_safety, prove_safe
from mosaic.planner.document import Draft, assemble
from mosaic.planner.placement import Placement, place
from mosaic.planner.search import search
from mosaic.registrar.graph import Graph

SMALL = {
    "model_type": "llada", "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "mlp_hidden_size": 96,
    "embedding_size": 257, "mask_token_id": 256, "torch_dtype": "float32",
}  # fmt: skip
CHUNKS = {"proj": 128, "ffn": 256, "logits": 64}
CONFIGURATIONS: list[dict[str, Any] | None] = [
    None,
    {"head": "fused", "attention": "queries", **CHUNKS},
    {"head": "logits", "attention": "heads", "hidden": "host", "stream": "all", "heads": 1, **CHUNKS},
]
REQUEST = Request(seq_lens=(400, 301), mask_ratio=0.5)


@pytest.fixture(scope="module")
def small() -> Planner:
    return Planner(load(SMALL), device="rtx-3090")


def break_placement(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[int], int], tuple[list[int], int]]) -> None:
    """Let the planner's placement give other addresses, or another peak, than were found."""

    def wrong(*args: Any, **more: Any) -> Placement:
        offsets, peak, _ = place(*args, **more)
        return Placement(*change(list(map(int, offsets)), peak), "faulty")

    for module in (planner, limits):
        monkeypatch.setattr(module, "place", wrong)


def all_at_zero(offsets: list[int], peak: int) -> tuple[list[int], int]:
    return [0] * len(offsets), peak


def build(g: Graph) -> None:
    tokens = g.dim("tokens")
    x, w = g.input("x", (tokens, 64), "float32"), g.weight("w", (64, 64), "float32")
    hidden = g.add_op("linear", x, w)
    g.add_op("linear", hidden, w, out=g.output("y", (tokens, 64), "float32"))


def test_a_wrong_placement_is_refused_by_every_way_to_a_plan(monkeypatch: pytest.MonkeyPatch, small: Planner) -> None:
    from mosaic.registrar.program import Program

    program = Program("twice", backend="cuda")
    program.add_phase("step", build)
    ways: list[Callable[[], object]] = [
        lambda: small.plan(REQUEST),
        lambda: small.plan(REQUEST, config=CONFIGURATIONS[1]),
        lambda: plan(small.model, tokens=100),
        lambda: plan_graph(build, dims={"tokens": 100}, device="h200"),
        lambda: plan_program(program, dims={"tokens": 100}, device="h200"),
    ]
    for way in ways:
        way()
    break_placement(monkeypatch, all_at_zero)
    for way in ways:
        with pytest.raises(UnsafePlan, match="overlap") as caught:
            way()
        assert caught.value.solver == "faulty"
        assert isinstance(caught.value, CheckFailed)
        assert caught.value.violations
        assert "faulty" in str(caught.value) and "report" in str(caught.value)


def test_compile_runs_no_wrong_placement(monkeypatch: pytest.MonkeyPatch, small: Planner) -> None:
    pytest.importorskip("torch")
    import mosaic

    break_placement(monkeypatch, all_at_zero)
    with pytest.raises(UnsafePlan, match="overlap"):
        mosaic.compile(small.model, device="cpu", max_tokens=64)


@pytest.mark.parametrize("config", CONFIGURATIONS)
def test_what_is_handed_out_is_valid_whatever_the_placement(
    monkeypatch: pytest.MonkeyPatch, small: Planner, config: dict[str, Any] | None
) -> None:
    """Random moves of a buffer and of the peak: most are refused, and the others pass the whole check."""
    rng = random.Random(1)

    def disturb(offsets: list[int], peak: int) -> tuple[list[int], int]:
        if rng.random() < 0.2:
            return offsets, peak + rng.choice((-512, 512))
        b = rng.randrange(len(offsets))
        offsets[b] = max(
            0, rng.choice((offsets[b] + 512, offsets[b] - 512, rng.choice(offsets), peak - 512, offsets[b] + 8))
        )
        return offsets, peak

    break_placement(monkeypatch, disturb)
    refused = handed = 0
    for _ in range(40):
        try:
            made = small.plan(REQUEST, config=config, limit=False)
        except UnsafePlan:
            refused += 1
            continue
        handed += 1
        assert check_plan(made.document) == []
    assert refused > 10
    assert handed


# Drafts.


def drafts(made: Planner, config: dict[str, Any] | None) -> Draft:
    point = made.at(REQUEST)
    result = search(point, made.budget_bytes, made.host_budget_bytes)
    if config is not None:
        result = replace(result, config=point.config(config), trace=())
    offsets, peak, solver = place(point, result.config)
    return assemble(
        point, result, offsets, peak, identity={"mosaic_version": "0", "model": "small", "dtype": "float32"},
        budget_bytes=made.budget_bytes, host_budget_bytes=made.host_budget_bytes, max_ctx_tokens=1 << 20, solver=solver,
    )  # fmt: skip


@pytest.mark.parametrize("config", CONFIGURATIONS)
def test_a_draft_and_its_document_get_one_verdict(small: Planner, config: dict[str, Any] | None) -> None:
    """Sound, and with a number of memory changed at random: in the numbers, or in what the header claims of them."""
    draft = drafts(small, config)
    assert prove_safe(draft.records, draft.header, draft.numbers) == check_safety(draft.document()) == []
    refused = 0
    for seed in range(40):
        rng = random.Random(seed)
        name = rng.choice(("offset", "offset", "size", "alias_offset", "shape", "rows", "header"))
        header, numbers = dict(draft.header), draft.numbers
        if name == "header":
            key = rng.choice(("peak_bytes", "lower_bound_bytes", "total_bytes", "host_bytes"))
            header[key] += rng.choice((-512, 512))
        elif getattr(numbers, name):
            column = list(getattr(numbers, name))
            at = rng.randrange(len(column))
            column[at] = (
                [2 * length for length in column[at]] if name == "shape" else column[at] + rng.choice((512, 4096))
            )
            numbers = numbers._replace(**{name: column})
        changed = replace(draft, header=header, numbers=numbers)
        verdict = prove_safe(draft.records, header, numbers)
        assert verdict == check_safety(changed.document())
        refused += bool(verdict)
    assert refused > 25


def test_a_document_is_written_when_it_is_asked_for_and_is_its_plans_own(small: Planner) -> None:
    """Changing one plan's document changes no other plan's, nor its proof."""
    first, second = small.plan(REQUEST), small.plan(REQUEST)
    expected = first.to_json()
    document: Any = second.document
    assert document is second.document
    for row in (*document["ops"], *document["buffers"], *document["barriers"]):
        for value in row.values():
            if isinstance(value, list):
                value.append(0)
            elif isinstance(value, dict):
                value["more"] = 0
    document["dims"]["tokens"] = 1
    document["components"].clear()
    third = small.plan(REQUEST)
    assert third.to_json() == expected == first.to_json()
    third.check()
    with pytest.raises(CheckFailed):
        second.prove()


def test_a_phase_keeps_streamed_weights_that_it_does_not_use(small: Planner) -> None:
    """A commit step has no head, but the head's weights have their place in host memory all the same."""
    request = Request(seq_lens=(64,), key_lens=(64,), phase=Phase(cache=KEPT, head=NO_HEAD))
    planned = small.with_budgets(host_budget=1 << 30).plan(request, config={"stream": "all"})
    unused = {b["id"] for b in planned.document["buffers"] if b["kind"] == "host" and b["tensor"] is not None}
    unused -= {b for op in planned.document["ops"] for b in op["reads"]}
    assert unused and check_plan(planned.document) == []


def test_properties_need_no_document(small: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    made = small.plan(REQUEST)

    def refuse(draft: Draft) -> dict[str, Any]:
        raise AssertionError("written too early")

    with monkeypatch.context() as patched:
        patched.setattr(Draft, "document", refuse)
        seen = {
            name: getattr(made, name)
            for name in (
                "model", "device", "dims", "config", "fits", "components", "total_bytes", "budget_bytes", "peak_bytes",
                "lower_bound_bytes", "optimal", "max_ctx_tokens", "predicted_step_ms",
            )
        }  # fmt: skip
        assert "fits" in repr(made)
    assert all(value == made.document[name] for name, value in seen.items())


def test_weights_of_a_plan_are_compared_with_where_they_were_loaded(small: Planner) -> None:
    loaded, other = small.plan(REQUEST), small.plan(Request(seq_lens=(77,)))
    other.prove(weights=loaded.weights)
    other.check(weights=loaded.weights)
    name, (pool, offset, size) = next(iter(loaded.weights.items()))
    for proof in (other.prove, other.check):
        with pytest.raises(CheckFailed, match="weight-address"):
            proof(weights={**loaded.weights, name: (pool, offset + 512, size)})
