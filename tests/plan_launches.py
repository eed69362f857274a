"""One launch of every shipped operator, with what it moves and computes worked out by hand, as a plan of one op."""

from __future__ import annotations

import random
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from plan_examples import barrier, buffer, op, plan, region
from plan_oracle import ITEM_BYTES, Document, Oracle, Row
from plan_random import settle_claims

DTYPES = {"f": "float32", "l": "int64", "i": "int32", "u": "uint8"}
STATISTICS = "token:l6 maximum:f6 second:f6 logsumexp:f6 entropy:f6"


class Launch(NamedTuple):
    """Operands as `name:dtype and shape`; one that is read and written has its shape where it is read.

    `free` operands may be of any dtype. `loose` ones may have another first axis, nothing counts it; `any_rank` ones may
    have more axes. `sliced` share their first axis, so a loop may slice it; `whole` says which letter forbids that.
    """

    kernel: str
    reads: str
    writes: str
    flops: int = 0
    attrs: Mapping[str, Any] = {}
    moved: str = ""  # by default all that is read and all that is written
    free: str = ""
    loose: str = ""
    any_rank: str = ""
    optional: str = ""  # operands and attributes
    host: str = ""
    inplace: str = ""  # written/read
    sliced: str = ""
    whole: str = ""


LAUNCHES = [
    Launch("advance_requests", "table:l5,49 canvas:l9 row:l2 begin:i2 cu_seqlens:i3 cu_rows:i3", "report:l2,19 table",
           attrs={"mask_id": 7}, moved="table table canvas=2 row begin cu_seqlens cu_rows report", loose="canvas"),
    Launch("attention", "q:f6,8 k:f5,4 v:f5,4 cu_seqlens:i3", "y:f6,8", 4 * 4 * 6 * 8,
           {"head_size": 2, "scale": 0.5, "span": 4, "block": 3}, free="k v cu_seqlens", any_rank="cu_seqlens",
           optional="span block", inplace="y/q", sliced="q y"),
    Launch("bound_parts", "chosen:i2,6 spans:i2,5 cu_seqlens:i3 held_rows:l2,2 held:i5,8", "held",
           attrs={"slot": 1, "kv_heads": 2, "heads": 1}, moved="chosen spans cu_seqlens held_rows held=8", loose="held"),
    Launch("confidence", "maximum:f6 logsumexp:f6", "y:f6", 2 * 6, sliced="maximum logsumexp y"),
    Launch("copy", "x:f6,4", "y:f6,4", host="x y", sliced="x y"),
    Launch("draw_requests", "table:l5,49 row:l2 cu_rows:i3 decided_rows:l6",
           "keys:l6 temperature:f6 top_p:f6 top_k:i6 cuts:u6 score_temperature:f6",
           sliced="decided_rows keys temperature top_p top_k cuts score_temperature", whole="M"),
    Launch("embedding", "ids:l6 table:f9,4", "y:f6,4", moved="ids y y", loose="table", host="table", sliced="ids y"),
    Launch("evict_tokens",
           "before:f2,3,4 after:f2,3,4 listed:i2,4 first:i2 progress:i2 status:u6 positions:i6 cu_seqlens:i3 decoded:i2 owner:l2 "
           "state:f5,4 ranks:f2,4", "rows:l6 bounds:i3 total:l1 seen:i2 state",
           attrs={"alpha": 1.5, "history": "ema", "threshold": "mean", "placeholders": "masked", "weight": 0.25, "keep": 4,
                  "rank": "bottom"},
           moved="before after listed first progress status positions cu_seqlens decoded owner ranks rows bounds total seen "
                 "state=4",
           loose="state", optional="ranks weight keep rank"),
    Launch("focus_requests", "table:l5,49 canvas:l9 state:f4,4 row:l2 cu_seqlens:i3 positions:i6",
           "first:i2 listed:i2,3 votes:u6 status:u6 progress:i2 decoded:i2 owner:l2 state",
           attrs={"own": 16, "block": 3, "processed": 0, "importance": "block", "first_step": "evicts", "reach": "block",
                  "history": "ema"},
           moved="table canvas=6 state=4 row cu_seqlens positions first listed votes status progress decoded owner",
           loose="canvas state"),
    Launch("gather_rows", "x:f9,4 rows:l6", "y:f6,4", moved="rows y y", loose="x", host="x", sliced="rows y"),
    Launch("grouped_linear", "x:f12,4 weight:f3,5,4 offsets:l4", "y:f12,5", 2 * 12 * 4 * 5, free="weight offsets",
           sliced="x y"),
    Launch("guide", "x:f6,4 uncond:f6,4 guidance:f6", "x", 3 * 6 * 4, sliced="x uncond guidance"),
    Launch("head_norm", "x:f6,8 weight:f2", "x", 4 * 6 * 8, {"eps": 1e-6}, free="x weight", any_rank="x", sliced="x"),
    Launch("joined_attention", "q:f6,8 kv:f9,16 extents:l5,4 cu_extents:i3 seen:i2 cu_seqlens:i3 positions:i6 prefix:i2 kept:f7,48 "
           "kept_sums:f5,24 owner:l2 fresh:f6,8 fresh_sums:f6,4 refreshed:i2", "y:f6,8 kept kept_sums", 4 * 3 * 6 * 8,
           {"layer": 1, "slot": 1, "rows": 3, "kv_heads": 2, "head_size": 2, "scale": 0.5, "block": 3},
           moved="q extents cu_extents seen cu_seqlens positions prefix owner fresh fresh_sums refreshed y kv=48 kept=48 "
           "kept_sums=12",
           loose="kv kept kept_sums", optional="kept kept_sums owner fresh fresh_sums refreshed block", inplace="y/q",
           sliced="q positions fresh fresh_sums y", whole="T"),
    Launch("key_change", "k:f6,4 kv:f9,16 extents:l5,4 cu_extents:i3 cu_seqlens:i3 positions:i6", "change:f2", 5 * 6 * 4,
           {"layer": 1, "head_size": 2}, moved="k kv=24 cu_extents cu_seqlens positions change",
           loose="kv extents"),
    Launch("key_mass",
           "q:f6,8 kv:f9,16 extents:l5,4 cu_extents:i3 captured:i2 cu_keys:i3 votes:u6 cu_seqlens:i3 logsumexp:f6,4 positions:i6",
           "mass:f4,7",
           2 * 4 * 6 * 8, {"layer": 1, "kv_heads": 2, "head_size": 2, "scale": 0.5, "sets": 4, "columns": 7, "span": 4,
                           "statistic": "mean", "block": 4, "rows": 4, "tiles": 1},
           moved="q extents cu_extents captured cu_keys votes cu_seqlens logsumexp positions mass kv=28", loose="kv",
           sliced="q votes logsumexp positions", whole="T",
           optional="positions columns span statistic block rows tiles"),
    Launch("kv_attention", "q:f6,8 kv:f9,16 extents:l5,4 cu_extents:i3 seen:i2 cu_seqlens:i3 positions:i6", "y:f6,8",
           4 * 4 * 6 * 8, {"layer": 1, "kv_heads": 2, "head_size": 2, "scale": 0.5, "span": 4, "keys": 5, "block": 3},
           moved="q extents cu_extents seen cu_seqlens positions y kv=40", loose="kv",
           optional="span keys block", inplace="y/q", sliced="q positions y"),
    Launch("kv_store", "k:f6,4 v:f6,4 kv:f9,16 extents:l5,4 cu_extents:i3 cu_seqlens:i3 positions:i6", "kv",
           attrs={"layer": 1, "head_size": 2}, moved="positions k v k v", loose="kv extents",
           sliced="k v positions"),
    Launch("linear", "x:f6,4 weight:f3,4 bias:f3", "y:f6,3", 2 * 6 * 4 * 3, free="weight bias", optional="bias", sliced="x y"),
    Launch("linear_add", "x:f6,4 weight:f3,4 y:f6,3", "y", 2 * 6 * 4 * 3, free="x weight y", sliced="x y"),
    Launch("minimum", "x:i6 other:i6", "y:i6", sliced="x other y"),
    Launch("moe_combine", "y:f12,4 order:l12 scores:f6,2 x:f6,4", "x", 2 * 6 * 2 * 4, free="y order scores x"),
    Launch("moe_gather", "x:f6,4 order:l12", "y:f12,4", attrs={"top_k": 2}, free="order"),
    Launch("moe_route", "x:f6,4 weight:f8,4 bias:f8", "scores:f6,2 experts:l6,2", 2 * 6 * 4 * 8,
           {"top_k": 2, "normalize": True, "scoring": "softmax", "groups": 4, "top_groups": 2, "scale": 1.0},
           free="weight", optional="bias scoring groups top_groups scale", sliced="x scores experts"),
    Launch("moe_sort", "experts:l6,2", "order:l12 offsets:l9", attrs={"num_experts": 8}, free="experts"),
    Launch("norm_gate_up", "x:f6,4 norm:f4 gate:f3,4 up:f3,4", "y:f6,3", 4 * 6 * 4 * 3, {"eps": 1e-6}, free="norm gate up",
           sliced="x y"),
    Launch("norm_qkv", "x:f6,4 norm:f4 q_weight:f6,4 k_weight:f3,4 v_weight:f3,4 arrivals:i5 q_bias:f6 k_bias:f3 v_bias:f3",
           "arrivals q:f6,6 k:f6,3 v:f6,3", 2 * 6 * 4 * (6 + 3 + 3), {"eps": 1e-6},
           moved="x norm q_weight k_weight v_weight q_bias k_bias v_bias q k v",
           free="norm q_weight k_weight v_weight q_bias k_bias v_bias", loose="arrivals", optional="q_bias k_bias v_bias",
           sliced="x q k v"),
    Launch("note_focus", "table:l5,49 state:f4,4 row:l2 cu_seqlens:i3 cu_rows:i3 seen:i2 committed:u6", "state",
           attrs={"own": 16, "processed": 0, "first_step": "evicts"},
           moved="table state=6 row cu_seqlens cu_rows seen committed", loose="state", sliced="committed", whole="M"),
    Launch("keep_requests", "table:l5,49 row:l2 seen:i2 cu_seqlens:i3 extents:l7,4 cu_extents:i3",
           "spans:i3,5 packed_extents:l3,4 cu_whole:i4 own_extents:l7,4"),
    Launch("pack_keys", "k:f6,4 v:f6,4 chosen:i2,6 spans:i2,5 cu_seqlens:i3 extents:l2,4 kv:f9,16 held:i5,8 held_row:l2", "kv",
           attrs={"layer": 1, "kv_heads": 2, "head_size": 2, "slot": 1},
           moved="k v chosen spans cu_seqlens k v held=8 held_row", loose="kv held", optional="held held_row slot"),
    Launch("packed_attention",
           "q:f6,8 k:f6,4 v:f6,4 kv:f9,16 extents:l2,4 held:i5,8 held_row:l2 spans:i2,5 cu_seqlens:i3", "y:f6,8",
           4 * 3 * 6 * 8 + 4 * 7 * 6 * 8,
           {"layer": 1, "slot": 1, "kv_heads": 2, "head_size": 2, "scale": 0.5, "span": 3, "keys": 7},
           moved="q k v kv=56 held=8 held_row spans cu_seqlens y", loose="kv held", inplace="y/q"),
    Launch("pack_requests", "table:l5,49 room:l1,8", "row:l2 begin:i2 seen:i2 cu_seqlens:i3 cu_rows:i3 cu_extents:i3 table",
           attrs={"sequences": 2}, optional="sequences"),
    Launch("page_bounds",
           "q:f6,8 extrema:f9,16 page_table:l5 cu_pages:i3 votes:u6 cu_seqlens:i3 positions:i6", "bound:f4,7", 4 * 3 * 6 * 8,
           {"slot": 1, "kv_heads": 2, "head_size": 2, "sets": 4, "columns": 7, "page_span": 3, "statistic": "mean", "block": 4,
            "rows": 4, "tiles": 1},
           moved="q page_table cu_pages votes cu_seqlens positions bound extrema=56", loose="extrema",
           sliced="q votes positions", whole="T", optional="positions columns page_span statistic block rows tiles"),
    Launch("page_extrema",
           "kv:f9,16 extents:l5,4 cu_extents:i3 page_table:l7 cu_pages:i3 first_page:i2 extrema:f8,24", "extrema",
           attrs={"layer": 1, "slot": 2, "page": 2, "kv_heads": 2, "head_size": 2, "tokens": 6},
           moved="extents cu_extents page_table cu_pages first_page kv=48", loose="kv extrema", optional="tokens"),
    Launch("perturb_score", "score:f6 keys:l6 temperature:f6", "score", 4 * 6, sliced="score keys temperature"),
    Launch("place_requests",
           "table:l5,49 canvas:l9 held_extents:l7,4 row:l2 begin:i2 cu_seqlens:i3 cu_rows:i3 cu_extents:i3",
           "positions:i5 token_rows:l5 rows:l6 decided_rows:l6 extents:l3,4 quota:i2 threshold:f2 edit_threshold:f2",
           attrs={"tokens": 5, "most": 6, "count": 3},
           moved="table canvas=6 held_extents row begin cu_seqlens cu_rows cu_extents positions token_rows rows decided_rows "
                 "extents quota threshold edit_threshold",
           loose="canvas", optional="tokens most count"),
    Launch("prefix_attention", "q:f6,8 kv:f9,16 extents:l5,4 cu_extents:i3 seen:i2 cu_seqlens:i3 positions:i6",
           "y:f6,8 logsumexp:f6,4", 4 * 4 * 6 * 8,
           {"layer": 1, "kv_heads": 2, "head_size": 2, "scale": 0.5, "span": 4, "keys": 5, "block": 3},
           moved="q extents cu_extents seen cu_seqlens positions y logsumexp kv=40", loose="kv",
           optional="span keys block", sliced="q positions y logsumexp"),
    Launch("prefix_logsumexp", "q:f6,8 kv:f9,16 extents:l5,4 cu_extents:i3 captured:i2 votes:u6 cu_seqlens:i3", "logsumexp:f6,4",
           2 * 4 * 6 * 8, {"layer": 1, "kv_heads": 2, "head_size": 2, "scale": 0.5, "span": 4, "keys": 7},
           moved="q extents cu_extents captured votes cu_seqlens logsumexp kv=28", loose="kv", sliced="q votes logsumexp",
           whole="T", optional="span keys"),
    Launch("query_change", "q:f6,8 kept:f7,24 owner:l2 prefix:i2 cu_seqlens:i3 positions:i6 refreshed:i2", "change:f2 kept",
           5 * 6 * 8, {"rows": 3}, moved="q owner prefix cu_seqlens positions refreshed change kept=48", loose="kept",
           optional="refreshed", sliced="q positions", whole="T"),
    Launch("read_canvas", "canvas:l9 rows:l6", "y:l6", attrs={"open_id": 3}, moved="rows y y", loose="canvas", sliced="rows y"),
    Launch("replace_rows", "y:f6 x:f6 chosen:u6", "y", sliced="y x chosen"),
    Launch("resume_rows", "chosen:l6 bounds:i3 positions:i6 rows:l5 cu_rows:i3",
           "kept:l4 kept_positions:i4 decided:l2 asked:l2 cu_decided:i3 place:i5", attrs={"size": 4, "most": 2},
           optional="size most"),
    Launch("reuse_requests", "table:l5,49 row:l2", "kept_row:l2 prefix:i2 refreshed:i2", attrs={"own": 25, "steps": 4},
           optional="steps"),
    Launch("rms_norm", "x:f6,4 weight:f4", "y:f6,4", 4 * 6 * 4, {"eps": 1e-6}, free="weight", inplace="y/x", sliced="x y"),
    Launch("rotary", "x:f6,8 positions:i6 inv_freq:f3,2 sequences:i6", "x", 6 * 6 * 8, {"head_size": 4, "factor": 1.0},
           free="x positions inv_freq", any_rank="inv_freq", optional="sequences factor", sliced="x positions sequences"),
    Launch("rotary_store", "q:f6,8 k:f6,4 v:f6,4 kv:f9,16 extents:l5,4 cu_extents:i3 cu_seqlens:i3 positions:i6 inv_freq:f3,1 "
           "q_norm:f2 k_norm:f2 sequences:i6", "q kv", 10 * 6 * 8, {"layer": 1, "head_size": 2, "eps": 1e-6, "factor": 1.0},
           moved="positions inv_freq q_norm k_norm sequences q k v q k v", free="inv_freq q_norm k_norm", any_rank="inv_freq",
           loose="kv extents", optional="q_norm k_norm sequences eps factor", sliced="q k v positions sequences"),
    Launch("row_nucleus", "logits:f6,9 keys:l6 temperature:f6 top_p:f6 top_k:i6 cuts:u6",
           "sample:l6 probability:f6 margin:f6 entropy:f6", 10 * 6 * 9, free="logits", optional="cuts",
           sliced="logits keys temperature top_p top_k cuts sample probability margin entropy"),
    Launch("row_sample", "logits:f6,9 keys:l6 temperature:f6", f"{STATISTICS} sample:l6 sample_logit:f6", 10 * 6 * 9,
           free="logits", sliced="logits keys temperature token maximum second logsumexp entropy sample sample_logit"),
    Launch("row_score", "maximum:f6 second:f6 logsumexp:f6 entropy:f6 sample_logit:f6 keys:l6", "score:f6", 4 * 6,
           {"kind": "margin"}, optional="keys",
           sliced="maximum second logsumexp entropy sample_logit keys score", whole="M"),
    Launch("row_stats", "logits:f6,9", STATISTICS, 6 * 6 * 9, free="logits",
           sliced="logits token maximum second logsumexp entropy"),
    Launch("score_keys", "q:f6,8 k:f6,4 spans:i2,5 cu_seqlens:i3", "scores:f2,6", 2 * 6 * 8,
           {"head_size": 2, "each": 1, "over": "mean"}, moved="k spans cu_seqlens scores", optional="over"),
    Launch("select_keys", "scores:f4,6 spans:i2,5 cu_seqlens:i3 held:i5,8 held_row:l2", "chosen:i2,6",
           attrs={"members": 2, "pool": 3, "pools": "sum", "slot": 1, "kv_heads": 2},
           moved="scores spans cu_seqlens held=8 held_row chosen", loose="held", optional="pools held held_row slot kv_heads"),
    Launch("select_requests", "table:l5,49 row:l2 seen:i2 cu_seqlens:i3 positions:i6",
           "owner:l2 captured:i2 candidates:i2 seen_exactly:i2 seen_sparsely:i2 cu_keys:i3 votes:u6",
           attrs={"own": 25, "carried": True, "answer": False}, optional="carried answer", sliced="positions votes", whole="T"),
    Launch("selected_attention", "q:f6,8 kv:f9,16 extents:l5,4 cu_extents:i3 selected:i7,24 owner:l2 captured:i2 seen:i2 "
           "cu_seqlens:i3 positions:i6", "y:f6,8", 4 * 5 * 6 * 8,
           {"layer": 1, "slot": 1, "sets": 4, "k": 4, "page": 2, "kv_heads": 2, "head_size": 2, "scale": 0.5, "attended": 5,
            "block": 3, "rows": 3, "tiles": 1},
           moved="q extents cu_extents owner captured seen cu_seqlens positions y selected=24 kv=128",
           loose="kv selected", optional="attended block rows tiles", inplace="y/q", sliced="q positions y"),
    Launch("shift_rows", "rows:l6 cu_seqlens:i3", "y:l6", free="k v cu_seqlens", any_rank="cu_seqlens", sliced="rows y"),
    Launch("silu_mul", "gate:f6,4 up:f6,4", "gate", 5 * 6 * 4, sliced="gate up"),
    Launch("split_linear_add", "x:f6,4 weight:f3,4 y:f6,3 arrivals:i5", "y arrivals", 2 * 6 * 4 * 3,
           moved="x weight y y", free="x weight y", loose="arrivals", sliced="x y"),
    Launch("token_importance",
           "q:f6,8 kv:f9,16 extents:l5,4 cu_extents:i3 cu_seqlens:i3 votes:u6 first:i2 listed:i2,5", "importance:f2,2,5",
           2 * 5 * 6 * 8, {"layer": 1, "kv_heads": 2, "head_size": 2, "scale": 0.5, "pool": 3},
           moved="q extents cu_extents cu_seqlens votes first listed importance kv=40", loose="kv", optional="pool"),
    Launch("top_keys", "mass:f4,7 captured:i2 cu_keys:i3 owner:l2 selected:i6,24", "selected",
           attrs={"slot": 1, "sets": 4, "k": 4, "page": 2, "ratio": 0.5, "enough": 0.9},
           moved="mass captured cu_keys owner selected=24", loose="selected", optional="ratio enough"),
    Launch("transfer", "token:l6 score:f6 current:l6 cu_rows:i3 quota:i2 threshold:f2 edit_threshold:f2",
           "chosen:l6 committed:u6", attrs={"rule": "quota", "mask_id": 3}, optional="edit_threshold",
           sliced="token score current chosen committed", whole="M"),
    Launch("unembed_sample", "x:f6,4 weight:f9,4 keys:l6 temperature:f6", f"{STATISTICS} sample:l6 sample_logit:f6",
           2 * 6 * 4 * 9, free="x weight", sliced="x keys temperature token maximum second logsumexp entropy sample sample_logit"),
    Launch("unembed_stats", "x:f6,4 weight:f9,4", STATISTICS, 2 * 6 * 4 * 9, free="x weight",
           sliced="x token maximum second logsumexp entropy"),
    Launch("write_canvas", "token:l6 rows:l6 canvas:l9 taken:u6", "canvas", moved="token rows token taken", loose="canvas",
           sliced="token rows taken"),
    Launch("zeros", "", "y:i7", attrs={"count": 7}),
]  # fmt: skip


def launched(launch: Launch) -> Document:
    """A plan of one op that is safe, and says of its launch what is so."""
    rows: list[Row] = []
    ids: dict[str, int] = {}
    written = [entry.partition(":")[0] for entry in launch.writes.split()]
    for entry in (*launch.reads.split(), *launch.writes.split()):
        name, _, spec = entry.partition(":")
        if name not in ids:
            ids[name] = len(rows)
            reads = entry in launch.reads.split()
            kind = ("state" if name in written else "input") if reads else "output"
            row = buffer(name, (0, 1), 0, kind=kind, pool=f"state/{name}" if kind == "state" else "workspace")
            rows.append({**row, "dtype": DTYPES[spec[0]], "shape": [*map(int, spec[1:].split(","))]})
    read = [ids[entry.partition(":")[0]] for entry in launch.reads.split()]
    row = {
        **op("launch", read, [ids[name] for name in written]), "kernel": launch.kernel, "operands": ids,
        "attrs": dict(launch.attrs), "flops": launch.flops,
    }  # fmt: skip
    document = plan([row], rows, peak_at="launch", peak_kib=0, lower_bound_kib=0, workspace_kib=0, total_kib=0)
    document["backend"] = "cpu"
    row["bytes"] = moved_bytes(launch, document)
    return resettled(document)


def moved_bytes(launch: Launch, document: Document, passes: int = 1) -> int:
    """The bytes of a launch over several iterations: a part of sliced operands each, all of others."""
    written = [entry.partition(":")[0] for entry in launch.writes.split()]
    default = [*document["ops"][0]["operands"], *(name for name in written if f"{name}:" not in launch.writes)]
    total = 0
    for entry in launch.moved.split() or default:
        name, _, count = entry.partition("=")
        row = document["buffers"][document["ops"][0]["operands"][name]]
        elements = int(count) if count else prod(row["shape"])
        total += elements * ITEM_BYTES[row["dtype"]] * (1 if name in launch.sliced.split() else passes)
    return total


def resettled(document: Document) -> Document:
    """Sizes, addresses and totals as shapes ask for."""
    tops: dict[str, int] = {}
    for row in document["buffers"]:
        row["size"] = Oracle(document).size(row["id"])
        row["offset"] = tops.get(row["pool"], 0)
        tops[row["pool"]] = row["offset"] + row["size"]
    settle_claims(document, random.Random(0))
    document.update(budget_bytes=1 << 40, host_budget_bytes=1 << 40, fits=True)
    document["formula"] = [{"expr": str(document["lower_bound_bytes"]), "at": "launch"}]
    return document


def looped(launch: Launch) -> Document:
    """The launch in a loop that takes four rows of its first axis at a time."""
    document = launched(launch)
    row, sliced = document["ops"][0], launch.sliced.split()
    extent = document["buffers"][row["operands"][sliced[0]]]["shape"][0]
    passes = -(-extent // 4)
    row.update(
        region="rows", slices=[[name, 0, "rows", 1] for name in sliced], bytes=moved_bytes(launch, document, passes)
    )
    document["regions"] = [region("rows", (0, 1), extent, 4, passes)]
    document["dims"]["rows"], document["config"]["rows"] = extent, 4
    inputs = [b for b in row["reads"] if b not in row["writes"]]
    document["barriers"] = [barrier("rows", (0, 1), of="rows", inputs=inputs, outputs=row["writes"])]
    return document
