"""Break what a plan says of itself besides bytes: settings, dims, formula, trace, profile."""

from __future__ import annotations

import copy

from mutations.choosing import Broken, Document, Pick, changed, choose


def exceed_context(document: Document, pick: Pick) -> Broken:
    """Claim a largest context below the one that this plan fits."""
    dims = document["dims"]
    if not document["fits"] or dims.get("seqs") != 1 or "tokens" not in dims:
        return None
    return changed(document, max_ctx_tokens=pick([0, dims["tokens"] - 1])), "context"


def break_number(document: Document, pick: Pick) -> Broken:
    """State a time, a context or a memory that is no such number."""
    key, value = pick(
        [
            ("predicted_step_ms", float("nan")), ("predicted_step_ms", -1), ("predicted_step_ms", float("inf")),
            ("max_ctx_tokens", -1), ("device_memory_bytes", -1), ("backend", "abacus"),
        ]
    )  # fmt: skip
    return changed(document, **{key: value}), "format"


def malform(document: Document, pick: Pick) -> Broken:
    """Put something else where entries, maps and numbers belong."""
    key, value = pick(
        [
            ("formula", [1]), ("formula", [{"expr": 1, "at": "x"}]), ("formula", [{"expr": "1"}]), ("formula", "42"),
            ("trace", ["x"]), ("trace", [{}]), ("mesh", {}), ("mesh", {"size": 0, "axes": {}}), ("mesh", {"size": 1}),
            ("dims", {**document["dims"], "tokens": 0}), ("dims", {"tokens": 1.5}), ("dims", {"tokens": True}),
            ("config", {**document["config"], "ffn": 0}), ("config", {"ffn": 0.5}), ("host_budget_bytes", -1),
            ("pools", [*document["pools"], {"name": "host", "device": "cpu", "capacity": -7}]),
            ("implementations", {"attention": None}), ("implementations", "triton"),
        ]
    )  # fmt: skip
    return changed(document, **{key: value}), "format"


def break_formula(document: Document, pick: Pick) -> Broken:
    """Drop the formula, enlarge a line, or let one name what there is not."""
    if not document["formula"] or document["lower_bound_bytes"] < _loose_bytes(document):
        return None
    mutated = copy.deepcopy(document)
    form = pick(mutated["formula"])
    how = pick(["drop", "add", "variable", "op", "call"])
    if how == "drop":
        mutated["formula"] = []
    elif how == "op":
        form["at"] = "nowhere"
    else:
        more = {"add": str(mutated["lower_bound_bytes"] + 1), "variable": "1*bananas", "call": "1*print()"}
        form["expr"] += f" + {more[how]}"
    return mutated, "formula"


def shrink_formula(document: Document, pick: Pick) -> Broken:
    """Halve every coefficient, or state a small number instead."""
    if document["lower_bound_bytes"] < 2 * _loose_bytes(document):
        return None
    mutated = copy.deepcopy(document)
    small = pick([True, False])
    for form in mutated["formula"]:
        terms = [term.split("*", 1) for term in form["expr"].split(" + ")]
        halved = " + ".join("*".join([str(int(number) // 2), *rest]) for number, *rest in terms)
        form["expr"] = "42" if small else halved
    return mutated, "formula"


def _loose_bytes(document: Document) -> int:
    """At least what rounding to 512 bytes, and in alias groups the bytes beyond one member, add to a formula."""
    members: dict[int, list[int]] = {row["id"]: [row["size"]] for row in document["buffers"] if row["alias_of"] is None}
    for row in document["buffers"]:
        if row["alias_of"] is not None:
            members[row["alias_of"]].append(row["size"])
    roots = [row for row in document["buffers"] if row["pool"] == "workspace" and row["alias_of"] is None]
    loose: list[int] = [
        sum(512 + row["size"] - min(members[row["id"]]) for row in roots if row["start"] <= t < row["end"])
        for t in range(len(document["ops"]))
    ]
    return max(loose)


def contradict_trace(document: Document, pick: Pick) -> Broken:
    """Let the search step that led to this plan state other bytes, or have other knobs."""
    chosen = choose(document, "trace", pick, lambda row: row["config"] == document["config"])
    if chosen is None:
        return None
    mutated, row = chosen
    key = pick(["peak_bytes", "total_bytes", "predicted_ms", "bottleneck"])
    row[key] = "nowhere" if key == "bottleneck" else row[key] + 512
    return mutated, "trace"


def forget_knob_in_trace(document: Document, pick: Pick) -> Broken:
    """Let a search step or the plan have a knob less."""
    chosen = choose(document, "trace", pick, lambda row: bool(row["config"]))
    if chosen is None:
        return None
    del chosen[1]["config"][pick(sorted(chosen[1]["config"]))]
    return chosen[0], "config"


def change_knob(document: Document, pick: Pick) -> Broken:
    """Drop a knob that is on, turn it off, give it other rows, or invent one."""
    on = sorted({row["knob"] for row in document["regions"]})
    if not on:
        return changed(document, config={**document["config"], "bananas": 128}), "config"
    config, knob = dict(document["config"]), pick(on)
    how = pick(["drop", "off", "more", "option", "invent"])
    if how == "drop":
        del config[knob]
    else:
        new = {"off": None, "more": config[knob] + 1, "option": "fused", "invent": 128}[how]
        config["bananas" if how == "invent" else knob] = new
    return changed(document, config=config), "config"


def change_dim(document: Document, pick: Pick) -> Broken:
    """Drop the dims, or state another number of tokens, masked rows, sequences or rows of logits."""
    if document["phase"] != "full_step":
        return None
    dims = dict(document["dims"])
    dim = pick([None, *sorted(dims)])
    if dim is None:
        return changed(document, dims={}), "dims"
    dims[dim] += 7919
    return changed(document, dims=dims), "dims"


def change_span(document: Document, pick: Pick) -> Broken:
    """State that a query sees another number of keys than attention's FLOPs have."""
    if not any(row["kernel"] == "attention" for row in document["ops"]):
        return None
    span = pick([1, document["dims"]["span"] + 1, 2 * document["dims"]["span"]])
    if span == document["dims"]["span"]:
        return None
    return changed(document, dims={**document["dims"], "span": span}), "flops"


def change_implementation(document: Document, pick: Pick) -> Broken:
    """Choose an implementation that there is not, for a kernel that has no choice, or none where one is needed."""
    chosen = dict(document["implementations"])
    how = pick(["unknown", "kernel", *sorted(chosen)])
    if how == "unknown":
        chosen["attention"] = "abacus"
    elif how == "kernel":
        chosen["linear"] = "cudnn"
    else:
        del chosen[how]
    return changed(document, implementations=chosen), "implementation"


def change_profile(document: Document, pick: Pick) -> Broken:
    """State another mesh, or a memory that context and libraries do not fit in."""
    how = pick(["mesh", "axes", "device"])
    if how == "device":
        small = document["components"]["context"] + document["components"]["library"]
        return changed(document, device_memory_bytes=pick([0, small])), "device"
    mesh = {"size": 8, "axes": document["mesh"]["axes"]} if how == "mesh" else {"size": 1, "axes": {"tensor": 8}}
    return changed(document, mesh=mesh), "mesh"


def change_pool(document: Document, pick: Pick) -> Broken:
    """Change the capacity of a pool, drop it, move it, or invent one."""
    mutated = copy.deepcopy(document)
    how = pick(["page", "huge", "drop", "move", "invent"])
    pool = pick([pool for pool in mutated["pools"] if pool["capacity"]])
    if how == "drop":
        mutated["pools"].remove(pool)
    elif how == "move":
        pool["device"] = "cuda:0" if pool["device"] == "cpu" else "cpu"
    elif how == "invent":
        mutated["pools"].append({"name": "bananas", "device": "cuda:0", "capacity": 0})
    else:
        pool["capacity"] = 1 << 50 if how == "huge" else pool["capacity"] + mutated["page_bytes"]
    return mutated, "pool"


def rename_region_dim(document: Document, pick: Pick) -> Broken:
    """Let a loop run over a dim that is none."""
    chosen = choose(document, "regions", pick)
    if chosen is None:
        return None
    chosen[1]["dim"] = "bananas"
    return chosen[0], "dims"


def stretch_region(document: Document, pick: Pick) -> Broken:
    """Let a loop run over another chunk than its dim has, its count adjusted."""
    chosen = choose(document, "regions", pick)
    if chosen is None:
        return None
    chosen[1]["extent"] += chosen[1]["rows"]
    chosen[1]["count"] += 1
    return chosen[0], "dims"


MUTATIONS = (
    exceed_context,
    break_number,
    malform,
    break_formula,
    shrink_formula,
    contradict_trace,
    forget_knob_in_trace,
    change_knob,
    change_dim,
    change_span,
    change_implementation,
    change_profile,
    change_pool,
    rename_region_dim,
    stretch_region,
)
