"""The hard test of the DSL: DiffusionGemma's two modes, registered, planned and checked (`diffusion_gemma_toy.py`)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import diffusion_gemma_toy as toy
import pytest

from mosaic.errors import GraphError
from mosaic.planner import Plan, plan_program
from mosaic.planner.check import check_plan
from mosaic.registrar.draw import to_dot, to_mermaid
from mosaic.registrar.graph import Graph
from mosaic.registrar.serialize import from_json, to_json
from mosaic.registrar.validate import validate
from mosaic.units import MIB

STEPS = ("encode", "denoise", "commit_then_denoise")
SIZES = {
    "short": toy.dims(prefix=300, prompt=300, canvas=64),
    "one canvas": toy.dims(prefix=8192),
    "long prefix": toy.dims(prefix=131072, prompt=4096),
    "four canvases": toy.dims(prefix=8191, prompt=101, canvas=1024),
}


@cache
def planned(size: str, device: str, workspace_mib: int | None = None) -> Mapping[str, Plan]:
    """Plans of all steps; with `workspace_mib`, in a budget that leaves so much for the workspace."""
    program, dims = toy.program(), SIZES[size]
    plans = plan_program(program, dims=dims, device=device)
    if workspace_mib is None:
        return plans
    fixed = plans["denoise"].total_bytes - plans["denoise"].components["workspace"]
    return plan_program(program, dims=dims, device=device, budget=fixed + workspace_mib * MIB)


def by_name(plan: Plan) -> dict[str, Mapping[str, Any]]:
    return {b["name"]: b for b in plan.document["buffers"]}


CASES = [
    (size, device, mib)
    for size in SIZES
    for device in ("h200", "rtx-4090")
    for mib in (None, 64 if size != "long prefix" else 512)
]


@pytest.mark.grid
@pytest.mark.parametrize(("size", "device", "workspace_mib"), CASES)
def test_every_step_fits_is_proved_optimal_and_passes_the_checker(
    size: str, device: str, workspace_mib: int | None
) -> None:
    plans = planned(size, device, workspace_mib)
    assert tuple(plans) == STEPS
    for plan in plans.values():
        assert plan.fits
        assert plan.optimal or plan.peak_bytes <= plan.lower_bound_bytes * 1.01
        assert check_plan(plan.document) == []


@pytest.mark.parametrize("size", SIZES)
def test_weights_and_state_have_one_address_in_all_steps(size: str) -> None:
    plans = planned(size, "h200")
    places = [
        {
            b["name"]: (b["pool"], b["offset"], b["size"])
            for b in plan.document["buffers"]
            if b["kind"] in ("weight", "state")
        }
        for plan in plans.values()
    ]
    assert len(places[0]) > 40
    assert places[0] == places[1] == places[2]
    assert len({(plan.components["weights"], plan.components["state"]) for plan in plans.values()}) == 1


def test_the_modes_tie_everything_but_the_layer_scalars() -> None:
    program = toy.program()
    used = {}
    for mode in ("encode", "denoise"):
        g = program.graph(mode)
        touched = {b.id for op in g.ops for b in op.reads}
        used[mode] = {b.name for b in g.buffers if b.kind == "weight" and b.id in touched}
    scalars = {f"layers.{n}/{mode}_scalar" for n in (0, 1) for mode in ("encoder", "decoder")}
    apart = used["encode"] ^ used["denoise"]
    assert scalars < apart
    assert {name for name in apart - scalars if not name.startswith(("self_conditioning/", "head/"))} == set()
    tensors = [b.tensor for b in program.graph("denoise").buffers if b.tensor and "layer_scalar" in b.tensor]
    assert len(set(tensors)) == 4
    assert "model.encoder.language_model.layers.1.layer_scalar" in tensors


def test_committed_state_is_capped_at_the_window_in_the_sliding_layer_only() -> None:
    """Bytes per token as in the facts of the release: 8,192 in a sliding layer, 4,096 in a full one."""
    buffers = by_name(planned("long prefix", "h200")["denoise"])
    sliding = [buffers[f"layers.0/committed_{what}"]["size"] for what in ("keys", "values")]
    full = [buffers[f"layers.1/committed_{what}"]["size"] for what in ("keys", "values")]
    assert sum(sliding) == 8192 * 1023
    assert sum(full) == 4096 * 131072
    with pytest.raises(GraphError, match="window_tokens = 1,024 exceeds window = 1,023"):
        plan_program(toy.program(), dims={**SIZES["long prefix"], "window_tokens": 1024}, device="h200")


def test_values_of_the_full_layer_come_from_keys_before_these_are_normed() -> None:
    g = toy.program().graph("denoise")
    ops = {op.name: op for op in g.ops}
    values, norm = ops["layers.1/v_norm"], ops["layers.1/k_norm"]
    assert values.operands["x"] is norm.operands["x"] is g["layers.1/k"]
    assert values.index < norm.index
    assert "layers.1/v_proj" not in {buffer.name for buffer in g.buffers}
    assert "layers.0/v_proj" in {buffer.name for buffer in g.buffers}


# -- the head: attention over the vocabulary -----------------------------------------------------------------------


def largest_by_elements(plan: Plan) -> int:
    """Elements of the largest buffer of the workspace and the state that runs along the vocabulary."""
    shapes: list[list[int]] = [
        b["shape"] for b in plan.document["buffers"] if b["pool"] != "weights" and b["name"].startswith("head/")
    ]
    return max(math.prod(shape) for shape in shapes if len(shape) == 2)


@pytest.mark.parametrize("device", ["h200", "rtx-4090"])
def test_a_small_budget_turns_the_vocabulary_tiles_on(device: str) -> None:
    canvas = SIZES["one canvas"]["canvas"]
    free, tight = planned("one canvas", device)["denoise"], planned("one canvas", device, 64)["denoise"]
    rows = tight.config["vocabulary"]
    assert isinstance(rows, int)
    width = free.config["vocabulary"] or toy.VOCABULARY  # off: 256 MiB of scores and 128 MiB of logits
    assert largest_by_elements(free) == canvas * int(width)
    assert free.peak_bytes > 6 * canvas * int(width) >= 4 * tight.peak_bytes / 3
    assert largest_by_elements(tight) <= canvas * rows
    assert tight.peak_bytes < 64 * MIB
    assert all(toy.VOCABULARY not in b["shape"] for b in tight.document["buffers"] if b["pool"] != "weights"), (
        "something of canvas x vocabulary is materialised"
    )


def test_rows_and_tiles_are_chunked_independently() -> None:
    config = {"canvas_rows": 256, "vocabulary": 8192}
    tight = plan_program(toy.program(), dims=SIZES["four canvases"], device="rtx-4090", config=config)["denoise"]
    assert check_plan(tight.document) == []
    regions = {r["name"]: r for r in tight.document["regions"]}
    assert regions["head/vocabulary"]["parent"] == "head/canvas_rows"
    assert regions["head/canvas_rows"]["count"] * regions["head/canvas_rows"]["rows"] >= 1024
    assert regions["head/vocabulary"]["count"] * regions["head/vocabulary"]["rows"] >= toy.VOCABULARY
    ops = {op["name"]: op for op in tight.document["ops"]}
    update = ops["head/vocab_tile_update"]
    assert ["scores", 0, "head/canvas_rows", 1] in update["slices"]
    assert ["scores", 1, "head/vocabulary", 1] in update["slices"]
    assert ["table", 0, "head/vocabulary", 1] in update["slices"]
    assert ["soft", 0, "head/canvas_rows", 1] in update["slices"]
    assert not any(s[0] in ("soft", "maximum") and s[2] == "head/vocabulary" for s in update["slices"])


@pytest.mark.parametrize("step", ["denoise", "commit_then_denoise"])
def test_accumulators_live_through_the_tiles_behind_a_barrier(step: str) -> None:
    plan = planned("one canvas", "h200", 24)[step]
    prefix = "" if step == "denoise" else "denoise/"
    region = next(r for r in plan.document["regions"] if r["knob"] == "vocabulary")
    barrier = next(b for b in plan.document["barriers"] if b["region"] == region["name"])
    buffers = by_name(plan)
    accumulators = [
        "soft_embedding",
        *(prefix + name for name in ("maximum", "total", "weighted", "noisy", "token", "sample")),
    ]
    for name in accumulators:
        b = buffers[name]
        assert b["id"] in barrier["outputs"]
        assert b["start"] <= region["start"] < region["end"] <= b["end"]
    assert buffers[f"{prefix}head/final_norm"]["id"] in barrier["inputs"]
    assert buffers[f"{prefix}head/final_norm"]["end"] == region["end"]
    tile = buffers[f"{prefix}head/scores"]
    assert (tile["start"], tile["end"]) == (region["start"] + 1, region["end"])
    assert buffers[f"{prefix}head/logits"]["end"] == region["start"] + 2


def test_the_checker_refuses_an_accumulator_that_is_given_up_inside_the_tiles() -> None:
    document = json.loads(planned("one canvas", "h200", 24)["denoise"].to_json())
    region = next(r for r in document["regions"] if r["knob"] == "vocabulary")
    maximum = next(b for b in document["buffers"] if b["name"] == "maximum")
    maximum["start"], maximum["end"] = region["start"] + 2, region["start"] + 3
    barrier = next(b for b in document["barriers"] if b["region"] == region["name"])
    barrier["outputs"].remove(maximum["id"])
    assert {"lifetime-short", "barrier-mismatch"} <= {violation.code for violation in check_plan(document)}


def test_the_soft_embedding_is_carried_between_steps_in_the_state() -> None:
    """2.75 MiB per canvas instead of the 128 MiB of logits that the reference carries."""
    plan = planned("one canvas", "h200")["denoise"]
    soft = by_name(plan)["soft_embedding"]
    assert (soft["kind"], soft["pool"], soft["size"]) == ("state", "state/soft_embedding", 256 * 2816 * 4)
    assert (soft["start"], soft["end"]) == (0, len(plan.document["ops"]))
    readers = [op["name"] for op in plan.document["ops"] if soft["id"] in op["reads"]]
    writers = [op["name"] for op in plan.document["ops"] if soft["id"] in op["writes"]]
    assert readers == ["self_conditioning/in", "head/vocab_tile_update", "head/vocab_finish"]
    assert writers == ["head/vocab_start", "head/vocab_tile_update", "head/vocab_finish"]


def test_the_formula_is_the_head_or_the_experts() -> None:
    """Without tiles 6 B per score (bfloat16 logits, float32 scores) over the whole vocabulary; with tiles, over one tile."""
    free = plan_program(toy.program(), dims=SIZES["one canvas"], device="h200", config={})["denoise"]
    tight = planned("one canvas", "h200", 24)["denoise"]
    statistics = 4 * 4 + 2 * 8  # a row's four float32 accumulators and two tokens; the soft embedding is state
    inputs = 4 + 16  # temperature and seed; the hidden states are not needed any more
    scores = {"expr": f"{6 * toy.VOCABULARY + statistics}*canvas + {inputs}", "at": "head/scores"}
    assert free.document["formula"] == [scores]
    heads = [form for form in tight.document["formula"] if form["at"].startswith("head/")]
    assert [form["expr"].split(" + ")[0] for form in heads] == ["6*canvas*vocabulary_rows"]
    rows, canvas = int(tight.config["vocabulary"] or 0), 256
    values = [eval(form["expr"], {}, {"canvas": canvas, "vocabulary_rows": rows}) for form in tight.document["formula"]]
    assert max(values) <= tight.lower_bound_bytes <= max(values) + 512 * len(tight.document["buffers"])


def test_the_joined_step_costs_no_more_than_its_larger_phase_and_its_own_inputs() -> None:
    plans = planned("one canvas", "h200")
    larger = max(plans["encode"].peak_bytes, plans["denoise"].peak_bytes)
    assert plans["commit_then_denoise"].peak_bytes <= larger + 64 * 1024
    apart = plans["encode"].predicted_step_ms + plans["denoise"].predicted_step_ms
    assert apart * 0.999 <= plans["commit_then_denoise"].predicted_step_ms <= apart * 1.005


# -- the graph itself ----------------------------------------------------------------------------------------------


@pytest.fixture(params=STEPS)
def graph(request: pytest.FixtureRequest) -> Graph:
    return toy.program().graph(request.param)


def test_it_travels_as_json(graph: Graph) -> None:
    text = to_json(graph)
    back = from_json(text)
    assert to_json(back) == text
    validate(back)


def test_it_can_be_drawn(graph: Graph) -> None:
    for text in (to_dot(graph), to_mermaid(graph)):
        assert all(op.name in text for op in graph.ops)


def test_it_needs_kernels_that_are_not_shipped(graph: Graph) -> None:
    from mosaic.registrar.operators import OPERATORS

    with pytest.raises(GraphError, match=r"diffusion_gemma_toy\.py:\d+\): no kernel 'scale'"):
        validate(graph, kernels=OPERATORS)
