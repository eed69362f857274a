"""Every CUDA kernel compiles for real cards, without a GPU: no spills, shared memory that fits, no hidden memory.

The real launchers run on meta tensors of an 8B model's shapes, in a process of its own; each launch is recorded with
its arguments, specialised as the just-in-time compiler would (1 as a constant, multiples of 16, addresses aligned to
16), and compiled ahead of time instead.

The test command compiles every kernel once, its first launch for Hopper. `make soak` compiles every launch for every card.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}  # most that one program may ask for
HOPPER = 90
# Libdevice's cosine and sine keep the digits of 2/pi on the stack for angles beyond 105,615: no spill.
STACK_BYTES = {"rotary_kernel": 32, "rotary_store_kernel": 32}
# The results of earlier segments are put aside while one is worked on, for `prefix_attention` their log-sum-exps, too.
STACK_BYTES |= {"kv_attention_kernel": 16, "kv_attention_tiles_kernel": 112}
# A share of keys, counted exactly, is a division in 64 bits: a call.
STACK_BYTES["parted_kernel"] = 8


# --- in the process of its own --------------------------------------------------------------------------------------

EVERY = "--every" in sys.argv


def launches() -> Iterator[tuple[str, dict[str, Any]]]:
    """Operands of every Triton operator: 2,048 rows of LLaDA-8B, and of LLaDA-MoE for the experts; bfloat16.

    Of the sizes of `transfer`, the test command takes every rule's in turn.
    """
    import torch

    from mosaic.registrar.operators.advance_requests import WIDTH
    from mosaic.registrar.request_table import COLUMNS

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    rows, hidden, size, feed, vocabulary = 2048, 4096, 128, 12288, 126464
    experts, top_k, width = 64, 8, 2048
    wide, index = torch.float32, torch.int64
    x, cu_seqlens = empty(rows, hidden), empty(2, dtype=torch.int32)
    choice, order = empty(rows, top_k, dtype=index), empty(rows * top_k, dtype=index)
    offsets, routed = empty(experts + 1, dtype=index), empty(rows * top_k, width)
    some, logsum = empty(rows, dtype=index), empty(rows, dtype=wide)
    yield "rms_norm", {"x": x, "weight": empty(hidden), "y": x, "eps": 1e-5}
    yield "head_norm", {"x": x, "weight": empty(size), "eps": 1e-6}
    angles = {"positions": empty(rows, dtype=torch.int32), "inv_freq": empty(size // 2, dtype=wide)}
    yield "rotary", {"x": x, **angles, "head_size": size}
    own = {"inv_freq": empty(3, size // 2, dtype=wide), "sequences": empty(rows, dtype=torch.int32)}
    yield "rotary", {"x": x, **angles, **own, "head_size": size, "factor": 1.2}
    yield "silu_mul", {"gate": empty(rows, feed), "up": empty(rows, feed)}
    yield "embedding", {"ids": some, "table": empty(vocabulary, hidden), "y": x}
    attrs = {"head_size": size, "scale": size**-0.5}
    keys = {"k": empty(rows, hidden // 4), "v": empty(rows, hidden // 4), "cu_seqlens": cu_seqlens}
    yield "attention", {"q": x, **keys, "y": x, **attrs}
    yield "attention", {"q": x, **keys, "y": x, **attrs, "block": 32}
    kv, narrow = empty(40_000, 36 * 2 * 1024), {"k": empty(rows, 1024), "v": empty(rows, 1024)}
    where = {"kv": kv, "extents": empty(5, 4, dtype=index), "cu_extents": cu_seqlens, "cu_seqlens": cu_seqlens}
    yield "kv_store", {**narrow, **where, "positions": empty(rows, dtype=torch.int32), "layer": 3, "head_size": size}
    changed = {"k": narrow["k"], **where, "positions": empty(rows, dtype=torch.int32), "change": empty(1, dtype=wide)}
    yield "key_change", {**changed, "layer": 3, "head_size": size}
    spans = {"spans": empty(1, 5, dtype=torch.int32), "cu_seqlens": cu_seqlens}
    scores, chosen = empty(32, rows, dtype=wide), empty(8, rows, dtype=torch.int32)
    for each, over in ((1, "max"), (4, "mean")):
        scored = {"q": x, "k": narrow["k"], "scores": scores[: 8 * each], "head_size": size, "each": each, "over": over}
        yield "score_keys", {**scored, **spans}
    for lists, members, pools in ((8, 1, "each"), (1, 32, "each"), (1, 32, "sum")):
        ranked = {"scores": scores[: lists * members], "chosen": chosen[:lists], "members": members, "pool": 3}
        yield "select_keys", {**ranked, **spans, "pools": pools}
    packed = {"kv": kv, "extents": empty(1, 4, dtype=index), "chosen": chosen, "layer": 3, "kv_heads": 8}
    yield "pack_keys", {**narrow, **packed, **spans, "head_size": size}
    held = {"held": empty(8, 512, dtype=torch.int32), "held_row": empty(1, dtype=index), "slot": 3}
    yield "pack_keys", {**narrow, **packed, **spans, **held, "head_size": size}
    yield (
        "select_keys",
        {"scores": scores[:8], "chosen": chosen, "members": 1, "pool": 3, **spans, **held, "kv_heads": 8},
    )
    bounded = {"held": held["held"], "held_rows": empty(1, 2, dtype=index), "slot": 3, "kv_heads": 8, "heads": 1}
    yield "bound_parts", {"chosen": chosen, **spans, **bounded}
    del packed["chosen"]
    yield "packed_attention", {"q": x, **narrow, **packed, **spans, **held, "y": x, **attrs}
    freq = {"positions": empty(32, dtype=torch.int32), "inv_freq": empty(size // 2, dtype=wide)}
    few = {"k": empty(32, 1024), "v": empty(32, 1024), **where, **freq, "layer": 3, "head_size": size}
    yield "rotary_store", {"q": x[:32], **few}
    yield "rotary_store", {"q": x[:32], **few, **own, "sequences": own["sequences"][:32], "factor": 1.2}
    yield "rotary_store", {"q": x[:32], **few, **dict.fromkeys(("q_norm", "k_norm"), empty(size)), "eps": 1e-6}
    arrivals = empty(512, dtype=torch.int32)
    for tokens, kv_width, inner in ((64, 1024, hidden), (2, 512, 3584), (32, hidden, hidden)):
        dtype = wide if tokens == 2 else torch.bfloat16
        sizes = {"q": inner, "k": kv_width, "v": kv_width}
        outputs = {name: empty(tokens, columns, dtype=dtype) for name, columns in sizes.items()}
        weights = {f"{name}_weight": empty(columns, inner, dtype=dtype) for name, columns in sizes.items()}
        biases = {f"{name}_bias": empty(columns, dtype=dtype) for name, columns in sizes.items() if tokens == 2}
        normed = {"x": empty(tokens, inner, dtype=dtype), "norm": empty(inner, dtype=dtype), "eps": 1e-6}
        yield "norm_qkv", {**normed, **weights, **biases, **outputs, "arrivals": arrivals}
        halves = dict.fromkeys(("gate", "up"), empty(18944 if tokens != 2 else feed, inner, dtype=dtype))
        active = empty(tokens, halves["up"].shape[0], dtype=dtype)
        yield "norm_gate_up", {**normed, **halves, "y": active}
        down = {"x": active, "weight": empty(inner, active.shape[1], dtype=dtype), "y": normed["x"]}
        yield "split_linear_add", {**down, "arrivals": arrivals}
    attrs |= {"layer": 3, "kv_heads": 8, "seen": empty(1, dtype=torch.int32), **where}
    windows = ((2, 0), (8, 4), (32, 0), (32, 32), (2048, 0), (2048, 32))  # every tile; split, and not
    for tokens, block in windows if EVERY else (windows[0], *windows[3:5]):
        window = dict.fromkeys("qy", x[:tokens]) | {"positions": empty(tokens, dtype=torch.int32)}
        yield "kv_attention", {**window, **attrs, "block": block, "parts": 512 if tokens < 512 else 1}
    two = {name: empty(3, dtype=torch.int32) for name in ("cu_seqlens", "cu_extents")}
    two |= {"seen": empty(2, dtype=torch.int32), "positions": empty(64, dtype=torch.int32)}
    yield "kv_attention", {**dict.fromkeys("qy", x[:64]), **attrs, **two, "block": 32, "parts": 512}
    many = {
        name: empty(18, dtype=torch.int32) for name in ("cu_seqlens", "cu_extents")
    }  # of blocks, or with a prompt's chunk
    many |= {"seen": empty(17, dtype=torch.int32), "positions": empty(64, dtype=torch.int32)}
    yield "kv_attention", {**dict.fromkeys("qy", x[:64]), **attrs, **many, "block": 4, "parts": 512}
    at = {"prefix": attrs["seen"], "owner": empty(1, dtype=index)}
    kept = {"kept": empty(8, 36 * 32 * hidden), "kept_sums": empty(8, 36 * 32 * 32, dtype=wide)}
    for tokens in (32, 2048, 64):
        window = dict.fromkeys("qy", x[:tokens]) | {"positions": empty(tokens, dtype=torch.int32)}
        fresh = {"logsumexp": empty(tokens, 32, dtype=wide), "parts": 512 if tokens < 512 else 1}
        if EVERY or tokens == 32:
            yield "prefix_attention", {**window, **attrs, "block": 32, **fresh}
        if tokens == 2048:
            continue
        window |= {"block": 32, "slot": 3, "rows": 32, **kept, **at}
        if tokens == 64:
            window |= {"fresh": x[:64], "fresh_sums": fresh["logsumexp"], "refreshed": attrs["seen"]}
        yield "joined_attention", {**attrs, **window}
        if tokens == 64:  # without states
            states = ("kept", "kept_sums", "owner")
            yield "joined_attention", {**attrs, **{name: value for name, value in window.items() if name not in states}}
    compared = {
        "q": x[:32],
        "kept": kept["kept"][:, : 32 * hidden],
        "rows": 32,
        "positions": empty(32, dtype=torch.int32),
    }
    compared |= {**at, "cu_seqlens": cu_seqlens, "change": empty(1, dtype=wide)}
    yield "query_change", compared
    yield "query_change", {**compared, "refreshed": attrs["seen"]}
    prefix = {"captured": empty(1, dtype=torch.int32), "cu_keys": cu_seqlens}
    pages = {"owner": empty(1, dtype=index), "selected": empty(64, 36 * 32 * 513, dtype=torch.int32), "slot": 2}
    page_rows = {
        "page_table": empty(1 << 13, dtype=index),
        "cu_pages": cu_seqlens,
        "extrema": kv[:9000, : 34 * 2 * 1024],
    }
    page_rows |= {"slot": 2, "kv_heads": 8, "head_size": size}
    made = {"first_page": empty(1, dtype=torch.int32), "page": 16, "layer": 3}
    yield "page_extrema", {**{name: where[name] for name in ("kv", "extents", "cu_extents")}, **page_rows, **made}
    sizes = ((32, 8, "mean", 1), (2048, 32, "max", 16), (2, 8, "worst", 4), (32, 8, "worst", 4))
    for tokens, sets, statistic, page in sizes if EVERY else sizes[:2]:
        window = {"q": x[:tokens], "sets": sets}
        chosen = {"k": 512, "page": page, "sets": sets, "captured": prefix["captured"]}
        tiles = 4 if (tokens, statistic) == (32, "worst") else 1
        mass, votes = empty(sets * tiles, 1 << 17, dtype=wide), empty(tokens, dtype=torch.uint8)
        placed = {"positions": empty(tokens, dtype=torch.int32)}
        tiled = {"block": 32, "rows": 8, "tiles": tiles} if tiles > 1 else {}
        of_layer = {name: value for name, value in attrs.items() if name != "seen"}
        sums = {"votes": votes, "logsumexp": empty(tokens, 32, dtype=wide)}
        yield "prefix_logsumexp", {**of_layer, "captured": prefix["captured"], "q": window["q"], **sums}
        of_tiles = {"statistic": statistic, **tiled, **(placed if tiled else {})}
        yield "key_mass", {**of_layer, **prefix, **window, **sums, "mass": mass, **of_tiles}
        yield "top_keys", {**prefix, **pages, **chosen, "mass": mass, "sets": sets * tiles, "ratio": 0.1 * (page - 1)}
        bound = {
            "bound": empty(sets * tiles, 1 << 13, dtype=wide),
            "votes": votes,
            "cu_seqlens": cu_seqlens,
        }
        yield "page_bounds", {**window, **page_rows, **bound, **of_tiles}
        window |= {"y": x[:tokens], **placed}
        yield "selected_attention", {**attrs, **window, **pages, **chosen, "block": 32, **tiled}
    figures = dict.fromkeys(("maximum", "second", "logsumexp", "entropy", "sample_logit"), logsum)
    for kind in ("confidence", "margin", "entropy", "random", "sequential"):
        yield "row_score", {**figures, "keys": some, "score": logsum, "kind": kind}
    yield "perturb_score", {"score": logsum, "keys": some, "temperature": logsum}
    yield "guide", {"x": x, "uncond": x, "guidance": logsum}
    limits = {"temperature": logsum, "top_p": logsum, "top_k": empty(rows, dtype=torch.int32)}
    drawn = {"sample": some, "probability": logsum, "margin": logsum, "entropy": logsum, "keys": some}
    cuts = empty(rows, dtype=torch.uint8)
    yield "replace_rows", {"y": logsum, "x": logsum, "chosen": cuts}
    for turn, dtype in enumerate((torch.bfloat16, wide) if EVERY else (torch.bfloat16,)):
        own = {"cuts": cuts} if turn == 0 else {}
        yield "row_nucleus", {"logits": empty(rows, vocabulary, dtype=dtype), **limits, **drawn, **own}
    per_sequence = {"quota": empty(4, dtype=torch.int32), "threshold": empty(4, dtype=wide)}
    for turn, rule in enumerate(("top", "threshold", "dynamic", "above", "factor", "edit")):
        for count in (rows, 100_000) if EVERY else (rows, 100_000)[turn % 2 :][:1]:
            of_rows = {name: empty(count, dtype=index) for name in ("token", "current", "chosen")}
            of_rows |= {"score": empty(count, dtype=wide), "committed": empty(count, dtype=torch.uint8)}
            edit = {"edit_threshold": empty(4, dtype=wide)} if rule == "edit" else {}
            bounds = {"cu_rows": empty(5, dtype=torch.int32)} | per_sequence
            yield "transfer", {**of_rows, **bounds, **edit, "rule": rule, "mask_id": 126336}
    yield "confidence", {"maximum": logsum, "logsumexp": logsum, "y": logsum}
    yield "read_canvas", {"canvas": some, "rows": some, "y": some, "open_id": 3}
    yield "write_canvas", {"token": some, "rows": some, "canvas": some, "taken": empty(rows, dtype=torch.uint8)}
    sequences, table = empty(64, dtype=torch.int32), {"table": empty(1024, COLUMNS, dtype=index)}  # the most requests
    bounds = {name: empty(65, dtype=torch.int32) for name in ("cu_seqlens", "cu_rows", "cu_extents")}
    packed = {"row": empty(64, dtype=index), "begin": sequences, **bounds}
    packing = {**packed, "room": empty(1, 8, dtype=index), "seen": sequences, "sequences": 64}
    for requests in (1024, 256, 64, 16):
        yield "pack_requests", {"table": table["table"][:requests], **packing}
    held = {"canvas": some, "held_extents": empty(300, 4, dtype=index), "extents": empty(70, 4, dtype=index)}
    placed = {
        "positions": empty(rows, dtype=torch.int32),
        **dict.fromkeys(("token_rows", "rows", "decided_rows"), some),
    }
    per_window = {"quota": sequences, "threshold": empty(64, dtype=wide), "edit_threshold": empty(64, dtype=wide)}
    yield "place_requests", {**table, **held, **packed, **placed, **per_window}
    of_rows = {"row": packed["row"], "cu_rows": bounds["cu_rows"], "decided_rows": some, "keys": some, "cuts": cuts}
    of_rows["score_temperature"] = limits["temperature"]
    yield "draw_requests", {**table, **of_rows, **limits}
    own = {"own": 25, "row": packed["row"], **table}
    some_of = {
        "seen": sequences,
        "cu_seqlens": bounds["cu_seqlens"],
        "positions": placed["positions"],
        "owner": packed["row"],
    }
    some_of |= dict.fromkeys(("captured", "candidates", "seen_exactly", "seen_sparsely"), sequences)
    for way in ({"carried": True}, {"answer": True}):
        yield "select_requests", {**own, **some_of, "cu_keys": bounds["cu_rows"], "votes": cuts, **way}
    for steps in (0, 4):
        each = dict.fromkeys(("prefix", "refreshed"), sequences)
        yield "reuse_requests", {**own, **each, "kept_row": packed["row"], "steps": steps}
    keeping = {"seen": sequences, "cu_seqlens": bounds["cu_seqlens"], "cu_extents": bounds["cu_extents"]}
    keeping |= {"spans": empty(65, 5, dtype=torch.int32), "cu_whole": empty(66, dtype=torch.int32)}
    keeping |= dict.fromkeys(("extents", "own_extents"), held["extents"]) | {
        "packed_extents": empty(65, 4, dtype=index)
    }
    yield "keep_requests", {**table, "row": packed["row"], **keeping}
    del packed["cu_extents"]
    yield (
        "advance_requests",
        {**table, **packed, "canvas": some, "report": empty(64, WIDTH, dtype=index), "mask_id": 63},
    )
    history = {"state": empty(64, 4, dtype=wide), "own": 23, "processed": 0}
    each = {**dict.fromkeys(("first", "progress", "decoded"), sequences), "owner": packed["row"]}
    each["listed"] = empty(64, 32, dtype=torch.int32)
    of_tokens = {"positions": placed["positions"], "votes": cuts, "status": cuts, "reach": "block"}
    asked = {**table, **history, "row": packed["row"], "cu_seqlens": bounds["cu_seqlens"]}
    for importance, first_step, counts in (("block", "evicts", "cumulative"), ("masked", "prefill", "block")):
        kinds = {"importance": importance, "first_step": first_step, "history": counts}
        yield "focus_requests", {**asked, **each, **of_tokens, **kinds, "canvas": some}
    noted = {"cu_rows": bounds["cu_rows"], "seen": sequences, "committed": cuts, "first_step": "prefill"}
    yield "note_focus", {**asked, **noted}
    bounds = {name: empty(5, dtype=torch.int32) for name in ("bounds", "cu_rows", "cu_decided")}
    numbers = {name: empty(rows, dtype=torch.int32) for name in ("positions", "kept_positions", "place")}
    of_kept = dict.fromkeys(("chosen", "kept", "rows", "decided", "asked"), some)
    yield "resume_rows", {**bounds, **numbers, **of_kept}
    block = {"first": empty(64, dtype=torch.int32), "listed": empty(64, 32, dtype=torch.int32)}
    batch = {name: empty(65, dtype=torch.int32) for name in ("cu_extents", "cu_seqlens")}
    of_batch = {**block, **batch, "kv": kv, "extents": where["extents"], "votes": empty(rows, dtype=torch.uint8)}
    for pool in (3, 1):
        importance = empty(64, 8, 32, dtype=wide)
        heads = {"layer": 1, "kv_heads": 8, "pool": pool, "importance": importance}
        yield "token_importance", {"q": x, **of_batch, **heads, "head_size": size, "scale": size**-0.5}
    per_sequence = {name: empty(64, dtype=torch.int32) for name in ("progress", "decoded", "seen")}
    of_rows = {"status": of_batch["votes"], "positions": numbers["positions"], "rows": some}
    found = {"bounds": batch["cu_seqlens"], "total": empty(1, dtype=index), "cu_seqlens": batch["cu_seqlens"]}
    of_requests = {"owner": empty(64, dtype=index), "state": empty(64, 4, dtype=wide)}
    for history, threshold, which, rank in (
        ("cumulative", "deviation", "masked", "bottom"), ("block", "mean", "unprocessed", "importance"),
    ):  # fmt: skip
        readings = {"history": history, "threshold": threshold, "placeholders": which, "alpha": 1.5, "weight": 0.5}
        if rank == "bottom":
            readings |= {"rank": rank, "keep": 4}
        else:
            readings |= {"ranks": empty(64, 32, dtype=wide)}
        layers = dict.fromkeys(("before", "after"), importance)
        yield "evict_tokens", {**layers, **block, **per_sequence, **of_rows, **found, **of_requests, **readings}
    yield "shift_rows", {"rows": some, "cu_seqlens": cu_seqlens, "y": some}
    router = {"x": empty(rows, width), "weight": empty(experts, width)}
    yield "moe_route", {**router, "scores": empty(rows, top_k), "experts": choice, "top_k": top_k, "normalize": True}
    many = {"x": empty(rows, width), "weight": empty(256, width), "bias": empty(256, dtype=wide)}
    groups = {"scoring": "sigmoid", "groups": 8, "top_groups": 4, "scale": 2.5}
    chosen = {"scores": empty(rows, top_k), "experts": choice, "top_k": top_k, "normalize": True}
    yield "moe_route", {**many, **chosen, **groups}  # LLaDA2.0
    yield "moe_sort", {"experts": choice, "order": order, "offsets": offsets, "num_experts": experts}
    yield "moe_gather", {"x": empty(rows, width), "order": order, "y": routed, "top_k": top_k}
    weights = empty(experts, 1024, width)
    for assigned in (rows * top_k, 64):  # many and few rows an expert
        given = {"x": routed[:assigned], "y": empty(assigned, 1024)}
        yield "grouped_linear", {**given, "weight": weights, "offsets": offsets}
    yield "moe_combine", {"y": routed, "order": order, "scores": empty(rows, top_k), "x": empty(rows, width)}


def samples() -> Iterator[tuple[str, dict[str, Any], tuple[int, ...]]]:
    """Operands of the statistics and samples of LLaDA-8B's head and of positions, and the cards whose code the launch is about.

    2,048 rows everywhere; in 80 and 90, whose code 86 and 89 share but for shared memory, also few rows, float32 and
    rows that no descriptor describes; if `EVERY`, every tile of Hopper's, with a narrow one after it and without. What reads
    logits is the same for any number of rows. If not `EVERY`, only the first kind is sampled from, as that compiles slowest.
    """
    import torch

    hidden, vocabulary, other = 4096, 126464, 152064
    both, hopper = (80, 90), (90,)
    kinds = [(2048, torch.bfloat16, hidden, vocabulary, tuple(SHARED_BYTES))]
    kinds += [(32, torch.bfloat16, hidden, vocabulary, both), (2048, torch.float32, hidden, vocabulary, both[::-1])]
    kinds += [(2048, torch.bfloat16, hidden + 4, vocabulary, hopper)]
    kinds += [(rows, torch.bfloat16, hidden, vocabulary, hopper) for rows in (128, 256)]
    kinds += [(rows, torch.bfloat16, hidden, other, hopper) for rows in (64, 128)]
    for turn, (rows, dtype, stride, vocabulary, cards) in enumerate(kinds if EVERY else kinds[:4]):

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device="meta")

        stats = {name: empty(rows) for name in ("maximum", "second", "logsumexp", "entropy")}
        stats["token"] = empty(rows, dtype=torch.int64)
        more = {"keys": empty(rows, dtype=torch.int64), "temperature": empty(rows), "sample_logit": empty(rows)}
        more["sample"] = empty(rows, dtype=torch.int64)
        x, weight = empty(rows, stride, dtype=dtype)[:, :hidden], empty(vocabulary, hidden, dtype=dtype)
        yield "unembed_stats", {"x": x, "weight": weight, **stats}, cards
        if EVERY or turn == 0:
            yield "unembed_sample", {"x": x, "weight": weight, **stats, **more}, cards
        if (rows, stride) != (2048, hidden):
            continue
        logits = empty(rows, vocabulary, dtype=dtype)
        yield "row_stats", {"logits": logits, **stats}, cards
        yield "row_sample", {"logits": logits, **stats, **more}, cards
    # the kernel of embedding over positions
    places, index = (torch.empty(2048, dtype=dtype, device="meta") for dtype in (torch.int32, torch.int64))
    yield "gather_rows", {"x": places, "rows": index, "y": places}, tuple(SHARED_BYTES)
    # Hopper's tiles for few rows an expert, and for fewer
    offsets = torch.empty(65, dtype=torch.int64, device="meta")
    x, y, weight = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta")
        for shape in ((2048, 2048), (2048, 1024), (64, 1024, 2048))
    )
    for rows in (2048, 64):
        yield "grouped_linear", {"x": x[:rows], "weight": weight, "offsets": offsets, "y": y[:rows]}, hopper
    # products of batch-invariant plans: every tile of Hopper's, if `EVERY`
    for rows in (2048, 64, 128, 256):
        for outer in (1024, 4096, 5120, 12288):
            operands = {"x": x[:rows], "weight": weight[0].new_empty(outer, 2048), "y": y.new_empty(rows, outer)}
            for operator in ("linear", "linear_add"):
                yield operator, operands, hopper if rows < 2048 else tuple(SHARED_BYTES)


def recorded(capability: int) -> list[tuple[str, Any, dict[str, Any]]]:
    """Run the launchers as on such a card; list (operator, kernel, arguments by name) of every launch, or of this card's."""
    import torch
    from operator_tables import scratch_rules
    from triton.runtime.jit import JITFunction

    from mosaic.kernels import load
    from mosaic.kernels.binding import launcher_of
    from mosaic.kernels.cuda import grouped_linear, invariant_linear, moe_route, unembed_stats
    from mosaic.kernels.cuda.shared import launching

    found: list[tuple[str, Any, dict[str, Any]]] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in kwargs}
        found.append((operator, self, dict(self.signature.bind(*args, **kwargs).arguments) | {"": options}))

    JITFunction.run = record
    launching.capability = lambda operand: capability
    for kernel in (unembed_stats, moe_route, grouped_linear, invariant_linear):
        kernel.has_descriptors = lambda x, weight: capability == 90 and x.element_size() == 2 and x.stride(0) % 8 == 0
    for operator, given, cards in [*((*launch, tuple(SHARED_BYTES)) for launch in launches()), *samples()]:
        if capability not in cards:
            continue
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
        rule = scratch_rules("cuda").get(operator)
        size = rule(shapes, dtypes, given) if rule else 0
        scratch = torch.empty(int(size), dtype=torch.uint8, device="meta") if size else None
        way = "hopper" if capability == HOPPER and operator in ("kv_attention", "prefix_attention") else None
        launch = launcher_of(
            load(operator, "cuda", "invariant" if operator in ("linear", "linear_add") else way).module
        )
        launch(**given, scratch=scratch)  # unchecked: what lies nowhere lies in one place
    return found


def specialised(kernel: Any, arguments: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """Signature, constants and divisibilities, as the just-in-time compiler would choose them."""
    import torch

    names = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8"}
    signature, constants, attributes = {}, {}, {}
    for parameter in kernel.params:
        value, place = arguments[parameter.name], (parameter.num,)
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], attributes[place] = f"*{names[value.dtype]}", [["tt.divisibility", 16]]
        elif hasattr(value, "block_shape"):
            layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
            signature[parameter.name] = f"tensordesc<{names[value.base.dtype]}{list(value.block_shape)}{layout}>"
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if abs(value) < 1 << 31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[place] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def usage(binary: bytes) -> dict[str, int]:
    """Registers, stack and local memory of a cubin."""
    from triton.backends import nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {key.lower(): int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def compile_all() -> None:
    """Print a line of JSON for every launch, with what its kernel uses if it is compiled."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    sources = {GluonJITFunction: GluonASTSource}
    done: set[str] = set()
    for capability in SHARED_BYTES if EVERY else (HOPPER,):
        for operator, kernel, arguments in recorded(capability):
            options = arguments.pop("")
            signature, constants, attributes = specialised(kernel, arguments)
            halves = any("bf16" in kind for kind in signature.values())
            line = {"operator": operator, "kernel": kernel.__name__, "capability": capability, "halves": halves}
            if kernel.__name__ in done and not EVERY:
                print(json.dumps(line), flush=True)
                continue
            done.add(kernel.__name__)
            source = sources.get(type(kernel), ASTSource)(kernel, signature, constants, attributes)
            binary = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            line |= {"shared": binary.metadata.shared, "global_scratch": binary.metadata.global_scratch_size}
            line |= {"wgmma": "wgmma" in binary.asm["ptx"]}
            print(json.dumps(line | usage(binary.asm["cubin"])), flush=True)


if __name__ == "__main__":
    compile_all()
    sys.exit()


# --- the tests --------------------------------------------------------------------------------------------------------

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


@pytest.fixture(
    scope="module",
    params=[pytest.param((HOPPER,), id="hopper"), pytest.param((*SHARED_BYTES,), id="every", marks=pytest.mark.soak)],
)
def cards(request: pytest.FixtureRequest) -> Sequence[int]:
    """The cards that kernels are compiled for."""
    given: Sequence[int] = request.param
    return given


@pytest.fixture(scope="module")
def launched(cards: Sequence[int], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Lines of a process of its own, which is run once for all workers."""
    own, every = tmp_path_factory.getbasetemp(), cards != (HOPPER,)
    kept = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / f"compiled-{every}.jsonl"
    with open(kept.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            kept.write_text(run_alone(every=every))
    return [json.loads(line) for line in kept.read_text().splitlines()]


def run_alone(*, every: bool) -> str:
    """The printed form of a program."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, __file__, *(["--every"] if every else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture
def compiled(launched: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of the launches whose kernel is compiled."""
    return [line for line in launched if "stack" in line]


def test_every_triton_operator_is_compiled(
    launched: list[dict[str, Any]], compiled: list[dict[str, Any]], cards: Sequence[int]
) -> None:
    from mosaic.registrar.operators import OPERATORS

    elsewhere = {"copy", "zeros", "minimum"}  # the driver and PyTorch carry these out
    for card in cards:
        mine = [line for line in launched if line["capability"] == card]
        assert {line["operator"] for line in mine} == set(OPERATORS) - elsewhere
        assert {line["kernel"] for line in mine} == {line["kernel"] for line in compiled if line["capability"] == card}


def test_kernels_compile_without_spills_and_within_shared_memory(
    compiled: list[dict[str, Any]], cards: Sequence[int]
) -> None:
    assert {line["capability"] for line in compiled} == set(cards)
    for line in compiled:
        assert line["stack"] <= STACK_BYTES.get(line["kernel"], 0) and line["local"] == 0, line
        assert line["shared"] <= SHARED_BYTES[line["capability"]], line
        assert line["global_scratch"] == 0, line


def test_products_use_the_tensor_cores_of_hopper(compiled: list[dict[str, Any]]) -> None:
    products = {"attention_kernel", "kv_attention_tiles_kernel", "packed_attention_kernel", "partial_kernel"}
    assert products == {line["kernel"] for line in compiled if line["wgmma"] and line["kernel"] in products}
    several = ("grouped_linear_kernel", "invariant_linear_kernel", "router_logits_kernel")
    mixture = [line for line in compiled if line["kernel"] in several]
    assert all(line["wgmma"] == (line["capability"] == 90) for line in mixture), mixture
    assert {line["kernel"] for line in mixture if line["wgmma"]} == set(several)


def test_products_of_few_rows_use_the_tensor_cores_of_hopper(compiled: list[dict[str, Any]]) -> None:
    """However few rows, as weights are the operand that has 64; float32, which soaks, is beyond them."""
    names = ("norm_qkv", "norm_gate_up", "split_linear_add")
    products = [line for line in compiled if line["operator"] in names and line["capability"] == 90]
    assert {line["operator"] for line in products if line["halves"]} == set(names)
    assert all(line["wgmma"] == line["halves"] for line in products), products


def test_fused_products_use_the_tensor_cores_of_hopper(compiled: list[dict[str, Any]]) -> None:
    products = [line for line in compiled if line["kernel"] == "partial_kernel" and line["capability"] == 90]
    # `make soak` has float32, which is beyond them, many rows, few, and those without descriptors
    assert any(line["halves"] for line in products)
    assert all(line["wgmma"] == line["halves"] for line in products), products
