"""A verdict's unproved claims are exactly those that a file can change without being refused."""

from __future__ import annotations

import copy

import pytest
from plan_examples import EXAMPLES, Document
from plan_launches import LAUNCHES, Launch, launched

from mosaic.planner import Planner, Request
from mosaic.planner.check import check_plan, unproved_claims


@pytest.fixture(scope="module")
def document() -> Document:
    return dict(Planner("llada-8b", device="rtx-3090").plan(Request(seq_lens=(1000,)), limit=False).document)


def claims(document: Document) -> str:
    return "; ".join(map(str, unproved_claims(document)))


def changed(document: Document, path: tuple[str | int, ...], value: object) -> Document:
    found = copy.deepcopy(document)
    at = found
    for key in path[:-1]:
        at = at[key]  # type: ignore[index]
    at[path[-1]] = value  # type: ignore[index]
    return found


def op_with(document: Document, attribute: str) -> int:
    return next(i for i, row in enumerate(document["ops"]) if attribute in row["attrs"])


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("model",), "another", "model"),
        (("mosaic_version",), "9", "mosaic_version"),
        (("device",), "abacus", "device"),
        (("estimated",), True, "estimated"),
        (("capability",), 1, "capability"),
        (("device_memory_bytes",), 1 << 50, "device_memory_bytes"),
        (("max_ctx_tokens",), 1 << 30, "max_ctx_tokens"),
        (("solver",), "magic", "solver"),
        (("config", "head"), "logits", "head"),
        (("ops", "eps"), 0.25, "eps"),
        (("ops", "scale"), 3.0, "scale"),
    ],
)
def test_what_a_file_may_change_is_listed(document: Document, path: tuple[str, ...], value: object, named: str) -> None:
    if path[0] == "ops":
        path = ("ops", op_with(document, path[1]), "attrs", path[1])  # type: ignore[assignment]
    mutant = changed(document, path, value)
    mutant["trace"] = []
    assert mutant != document
    assert check_plan(mutant) == []
    assert named in claims(mutant)


@pytest.mark.parametrize(
    ("path", "value", "code"),
    [
        (("dtype",), "float16", "dtype"),
        (("optimal",), False, "optimal"),
        (("config", "invented"), 128, "config"),
        (("max_ctx_tokens",), 999, "context"),
        (("dims", "masked"), 1, "dims"),
        (("implementations",), {}, "implementation"),
    ],
)
def test_what_is_proved_cannot_be_changed(document: Document, path: tuple[str, ...], value: object, code: str) -> None:
    mutant = changed(document, path, value)
    mutant["trace"] = []
    assert code in {violation.code for violation in check_plan(mutant)}


def test_unknown_kernels_are_their_authors_word(document: Document) -> None:
    assert "kernels that Mosaic does not ship" not in claims(document)
    mutant = changed(document, ("ops", 3, "kernel"), "my_kernel")
    mutant["declared"]["kernels"] = ["my_kernel"]
    assert check_plan(mutant) == []
    assert "my_kernel (1 ops)" in claims(mutant)


def test_a_plan_that_declares_no_streams_proves_no_names_of_them() -> None:
    streamed = dict(
        Planner("llada-8b", device="cpu", budget="8GiB", host_budget="32GiB")
        .plan(Request(seq_lens=(1000,)), limit=False)
        .document
    )
    assert streamed["declared"]["streams"] and "names of streams" not in claims(streamed)
    del streamed["declared"]
    assert check_plan(streamed) == [] and "names of streams" in claims(streamed)


def test_the_list_depends_on_what_a_plan_has() -> None:
    bare = EXAMPLES["chain"]()
    said = claims(bare)
    assert "mix (" in said and "dtype" in said and "scratch" in said
    assert "attributes" not in said and "options" not in said
    assert "dims tokens, seqs" in said  # of a phase whose dims nothing shows
    assert f"but that {bare['dims']['tokens']} tokens fit" in said
    bare["fits"] = False
    assert "tokens fit" not in claims(bare)
    step = claims(EXAMPLES["step"]())
    assert "dims" not in step and "dtype" not in step and "options of head" in step
    looped = EXAMPLES["chunked"]()
    assert "ffn" not in claims(looped).split("dims ")[1].split(" (")[0]
    looped["config"]["idle"] = None
    assert "that idle could have been on" in claims(looped)


COMMON = [
    "model, mosaic_version, phase, names, tensors (the graph is not compared with the model's)",
    "device, capability, estimated, device_memory_bytes, page_bytes, components.context, components.library (the device's profile)",
    "predicted_step_ms and the trace's times (the cost model)",
]
FITS, CONTEXT = "max_ctx_tokens, but that 5 tokens fit (planning again)", "max_ctx_tokens (planning again)"
SEARCH = [
    "solver and the search's moves and configurations (the search)",
    "budget_bytes, host_budget_bytes (the request of the plan)",
    "that no setting and no size is missing (planning again)",
]
FREE = "in this phase no loop and no rule shows them"
UNKNOWN = "touch and cost (kernels that Mosaic does not ship)"
NO_WEIGHTS = "dtype (the plan has no weights)"
SILENT = "the model's configuration: no shape and no count tells them"


def said(document: Document) -> list[str]:
    found = [str(claim) for claim in unproved_claims(document)]
    assert found[:3] == COMMON and found[4:7] == SEARCH
    return [found[3], *found[7:]]


def test_the_list_word_for_word() -> None:
    chain = EXAMPLES["chain"]()
    scratch, mixes = "sizes of scratch buffers (the backend's kernels)", f"what the kernels mix (3 ops) {UNKNOWN}"
    assert said(chain) == [FITS, f"dims tokens, seqs ({FREE})", NO_WEIGHTS, mixes, scratch]
    chain["buffers"][3]["kind"] = "transient"
    chain["ops"][1]["kernel"] = "other"
    chain["buffers"][0]["tensor"] = "model.x"
    both = f"what the kernels mix (2 ops), other (1 ops) {UNKNOWN}"
    assert said(chain) == [FITS, f"dims tokens, seqs ({FREE})", both]
    chain["dims"] = {}
    assert said(chain) == [CONTEXT, both]
    for change in ({"fits": False}, {"dims": {"tokens": 5, "seqs": 2}}, {"dims": {"seqs": 1}}):
        assert said({**EXAMPLES["chain"](), **change})[0] == CONTEXT
    weighty = EXAMPLES["pools"]()
    assert NO_WEIGHTS not in said(weighty)
    looped = EXAMPLES["chunked"]()
    looped["config"].update(idle=None, ffn=None, head="fused", order="late", more=3)
    looped["dims"]["extra"] = 7
    assert said(looped) == [
        FITS, "config: the options of head, order (planning again)", "config: that idle could have been on (planning again)",
        f"dims tokens, seqs, extra ({FREE})", NO_WEIGHTS, f"what the kernels mix (5 ops) {UNKNOWN}",
    ]  # fmt: skip
    looped.update(phase="full_step", config={}, dims={"ffn": 5})
    assert said(looped) == [CONTEXT, NO_WEIGHTS, f"what the kernels mix (5 ops) {UNKNOWN}"]
    looped["phase"] = "example"
    assert said(looped) == [CONTEXT, NO_WEIGHTS, f"what the kernels mix (5 ops) {UNKNOWN}"]
    step = EXAMPLES["step"]()
    tokens = "max_ctx_tokens, but that 4 tokens fit (planning again)"
    assert said(step) == [
        tokens,
        "config: the options of head (planning again)",
        f"attributes head_size, scale ({SILENT})",
    ]


SILENT_OF = {  # attributes that neither a shape nor FLOPs nor bytes tell
    "advance_requests": "mask_id", "attention": "head_size, scale, block", "head_norm": "eps",
    "kv_attention": "layer, scale, block",
    "key_mass": "layer, scale, statistic, block, rows",
    "selected_attention": "layer, slot, page, kv_heads, scale, block, rows",
    "prefix_attention": "layer, scale, block", "joined_attention": "layer, slot, scale, block", "query_change": "rows",
    "page_bounds": "slot, statistic, block, rows", "page_extrema": "layer, slot, page",
    "top_keys": "slot, k, page, ratio, enough", "prefix_logsumexp": "layer, scale",
    "token_importance": "layer, scale, pool", "evict_tokens": "alpha, history, threshold, placeholders, weight, keep, rank",
    "kv_store": "layer, head_size", "score_keys": "head_size, each, over", "select_keys": "pool, pools, slot, kv_heads",
    "pack_keys": "layer, head_size, slot", "packed_attention": "layer, slot, scale",
    "bound_parts": "slot, kv_heads", "key_change": "layer, head_size",
    "focus_requests": "own, processed, importance, first_step, reach, history",
    "note_focus": "own, processed, first_step",
    "read_canvas": "open_id", "moe_route": "normalize, scoring, groups, top_groups, scale",
    "rms_norm": "eps", "rotary": "head_size, factor", "rotary_store": "layer, head_size, eps, factor",
    "norm_gate_up": "eps", "norm_qkv": "eps",
    "reuse_requests": "own, steps", "select_requests": "own, carried, answer",
    "row_score": "kind", "transfer": "rule, mask_id",
}  # fmt: skip


@pytest.mark.parametrize("launch", LAUNCHES, ids=[launch.kernel for launch in LAUNCHES])
def test_attributes_that_nothing_tells(launch: Launch) -> None:
    document = launched(launch)
    listed = [claim for claim in said(document) if claim.startswith("attributes ")]
    silent = SILENT_OF.get(launch.kernel)
    assert listed == ([f"attributes {silent} ({SILENT})"] if silent else [])
    document["ops"][0]["attrs"] = {}
    assert not any(claim.startswith("attributes ") for claim in said(document))
