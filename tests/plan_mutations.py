"""Ways to break a plan document, each of which the checker must refuse.

A mutation takes a valid document and `pick`, a choice from a list (`random.Random(0).choice`, or hypothesis's). It
returns a broken copy and a code that is among the checker's reasons, or None where the document offers nothing to break
this way. A mutation that could leave a valid plan, such as moving a buffer into free space, is not among them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Document = dict[str, Any]
Row = dict[str, Any]
Pick = Callable[[Sequence[Any]], Any]
Broken = tuple[Document, str] | None
Mutation = Callable[[Document, Pick], Broken]

_PAGED = ("workspace", "weights", "state")


def _choose(
    document: Document, key: str, pick: Pick, suits: Callable[[Row], bool] = lambda row: True
) -> tuple[Document, Row] | None:
    """Copy a document and pick one of its rows; None if none suits."""
    suitable = [k for k, row in enumerate(document[key]) if suits(row)]
    if not suitable:
        return None
    mutated = copy.deepcopy(document)
    return mutated, mutated[key][pick(suitable)]


def _placed(row: Row) -> bool:
    return row["pool"] in _PAGED


def misalign(document: Document, pick: Pick) -> Broken:
    """Shift an offset by less than the alignment."""
    chosen = _choose(document, "buffers", pick, _placed)
    if chosen is None:
        return None
    chosen[1]["offset"] += pick([1, 8, 256, 511])
    return chosen[0], "alignment"


def collide(document: Document, pick: Pick) -> Broken:
    """Move a root to the address of another that is live at the same time."""
    roots = [
        row for row in document["buffers"] if row["pool"] == "workspace" and row["alias_of"] is None and row["size"]
    ]
    held = {
        row["id"]: {t for t in range(row["start"], row["end"]) if not any(a <= t < b for a, b in row["gaps"])}
        for row in roots
    }
    pairs = [
        (a["id"], b["id"])
        for a in roots
        for b in roots
        if a["offset"] != b["offset"] and not held[a["id"]].isdisjoint(held[b["id"]])
    ]  # fmt: skip
    if not pairs:
        return None
    a, b = pick(pairs)
    mutated = copy.deepcopy(document)
    mutated["buffers"][a]["offset"] = mutated["buffers"][b]["offset"]
    return mutated, "overlap"


def leave_pool(document: Document, pick: Pick) -> Broken:
    """Move a buffer beyond its pool's end."""
    chosen = _choose(document, "buffers", pick, _placed)
    if chosen is None:
        return None
    mutated, row = chosen
    row["offset"] = next(pool["capacity"] for pool in mutated["pools"] if pool["name"] == row["pool"])
    return mutated, "pool-bounds"


def shorten_lifetime(document: Document, pick: Pick) -> Broken:
    """Take ops off either end of a lifetime."""
    chosen = _choose(document, "buffers", pick, lambda row: row["end"] > row["start"])
    if chosen is None:
        return None
    row, by = chosen[1], 1
    if pick(["start", "end"]) == "start":
        row["start"] += by
    else:
        row["end"] -= by
    return chosen[0], "lifetime-short"


def lengthen_lifetime(document: Document, pick: Pick) -> Broken:
    """Add an op to either end of a lifetime."""
    chosen = _choose(document, "buffers", pick)
    if chosen is None:
        return None
    row = chosen[1]
    if row["start"] and pick(["start", "end"]) == "start":
        row["start"] -= 1
    else:
        row["end"] += 1
    return chosen[0], "lifetime-long"


def drop_region_barrier(document: Document, pick: Pick) -> Broken:
    """Drop the barrier of a region."""
    chosen = _choose(document, "barriers", pick, lambda row: row["region"] is not None)
    if chosen is None:
        return None
    chosen[0]["barriers"].remove(chosen[1])
    return chosen[0], "barrier-missing"


def drop_explicit_barrier(document: Document, pick: Pick) -> Broken:
    """Drop an explicit barrier that alone accounts for the end of some buffer's lifetime."""
    ends = {row["end"] for row in document["regions"]} | {edge["to"] for edge in document["edges"]}
    buffers, ops = document["buffers"], document["ops"]

    def alone(row: Row) -> bool:
        others = [other for other in document["barriers"] if other is not row and other["end"] == row["end"]]
        return (
            row["region"] is None
            and not others
            and row["end"] not in ends
            and row["end"] < len(ops)
            and any(
                buffers[b]["end"] == row["end"]
                and b not in ops[row["end"] - 1]["reads"]
                and b not in ops[row["end"] - 1]["writes"]
                and all(other["alias_of"] != b for other in buffers)
                for b in row["inputs"]
            )
        )  # fmt: skip

    chosen = _choose(document, "barriers", pick, alone)
    if chosen is None:
        return None
    chosen[0]["barriers"].remove(chosen[1])
    return chosen[0], "lifetime-long"


def drop_barrier_buffer(document: Document, pick: Pick) -> Broken:
    """Drop a buffer from a region's barrier."""
    lists = ("inputs", "outputs", "carried")
    chosen = _choose(
        document, "barriers", pick, lambda row: row["region"] is not None and any(row[key] for key in lists)
    )
    if chosen is None:
        return None
    chosen[1][pick([key for key in lists if chosen[1][key]])].pop()
    return chosen[0], "barrier-mismatch"


def swap_barrier_lists(document: Document, pick: Pick) -> Broken:
    """Exchange the inputs and outputs of a region's barrier."""
    chosen = _choose(
        document, "barriers", pick, lambda row: row["region"] is not None and row["inputs"] != row["outputs"]
    )
    if chosen is None:
        return None
    row = chosen[1]
    row["inputs"], row["outputs"] = row["outputs"], row["inputs"]
    return chosen[0], "barrier-mismatch"


def move_barrier(document: Document, pick: Pick) -> Broken:
    """Let a region's barrier end an op early."""
    chosen = _choose(
        document, "barriers", pick, lambda row: row["region"] is not None and row["end"] - row["start"] > 1
    )
    if chosen is None:
        return None
    chosen[1]["end"] -= 1
    return chosen[0], "barrier-mismatch"


def shift_alias(document: Document, pick: Pick) -> Broken:
    """Move an alias away from its root."""
    chosen = _choose(document, "buffers", pick, lambda row: row["alias_of"] is not None)
    if chosen is None:
        return None
    chosen[1][pick(["offset", "alias_offset"])] += 512
    return chosen[0], "alias"


def detach_alias(document: Document, pick: Pick) -> Broken:
    """Make an alias that outlives its root's own value a root of its own."""
    alone = [row["alias_of"] for row in document["buffers"]]

    def reaches_end(row: Row) -> bool:
        root = row["alias_of"]
        if root is None or alone.count(root) > 1:
            return False
        last = max((op["index"] for op in document["ops"] if root in (*op["reads"], *op["writes"])), default=-1)
        return bool(
            row["end"] == document["buffers"][root]["end"] > last + 1
            and not document["barriers"]
            and not row["alias_offset"]
        )

    chosen = _choose(document, "buffers", pick, reaches_end)
    if chosen is None:
        return None
    chosen[1].update(alias_of=None, alias_offset=0)
    return chosen[0], "lifetime-long"


def forbid_inplace(document: Document, pick: Pick) -> Broken:
    """Take from an op the permission to overwrite an alias that it reads."""
    buffers = document["buffers"]
    roots = [b if row["alias_of"] is None else row["alias_of"] for b, row in enumerate(buffers)]
    chosen = _choose(document, "ops", pick, lambda row: any(roots[a] == roots[b] for a, b in row["inplace"]))
    if chosen is None:
        return None
    chosen[1]["inplace"] = []
    return chosen[0], "alias-stale-read"


def change_size(document: Document, pick: Pick) -> Broken:
    """Change a size: too small, or larger than the shape and the aliases explain."""
    chosen = _choose(document, "buffers", pick, lambda row: _placed(row) and row["size"] > 0)
    if chosen is None:
        return None
    chosen[1]["size"] += pick([-512, -1, 1, 512])
    return chosen[0], "size"


def change_shape(document: Document, pick: Pick) -> Broken:
    """Let a shape need more bytes than its buffer has."""
    chosen = _choose(document, "buffers", pick, lambda row: bool(row["shape"]) and row["size"] > 0)
    if chosen is None:
        return None
    chosen[1]["shape"][0] += chosen[1]["size"] // 8 + 8192
    return chosen[0], "size"


def change_peak(document: Document, pick: Pick) -> Broken:
    """State another peak."""
    mutated = copy.deepcopy(document)
    mutated["peak_bytes"] += pick([512, 4096, 1 << 21])
    return mutated, "peak"


def change_lower_bound(document: Document, pick: Pick) -> Broken:
    """State another lower bound."""
    mutated = copy.deepcopy(document)
    mutated["lower_bound_bytes"] += pick([512, 4096, 1 << 21])
    return mutated, "lower-bound"


def claim_optimal(document: Document, pick: Pick) -> Broken:
    """Flip the certificate."""
    mutated = copy.deepcopy(document)
    mutated["optimal"] = not mutated["optimal"]
    return mutated, "optimal"


def change_component(document: Document, pick: Pick) -> Broken:
    """State fewer or more pages for a pool."""
    mutated = copy.deepcopy(document)
    mutated["components"][pick(list(_PAGED))] += mutated["page_bytes"]
    return mutated, "components"


def change_total(document: Document, pick: Pick) -> Broken:
    """State another total."""
    mutated = copy.deepcopy(document)
    mutated["total_bytes"] += pick([1, 4096])
    return mutated, "total"


def flip_fits(document: Document, pick: Pick) -> Broken:
    """Flip the verdict, or take the budget away from under it."""
    mutated = copy.deepcopy(document)
    if mutated["fits"] and pick([True, False]):
        mutated["budget_bytes"] = mutated["total_bytes"] - 1
    else:
        mutated["fits"] = not mutated["fits"]
    return mutated, "fits"


def drop_edge(document: Document, pick: Pick) -> Broken:
    """Drop one fork or wait: the side op is no longer ordered with main."""
    stream = [op["stream"] for op in document["ops"]]
    waits = [edge for edge in document["edges"] if edge["kind"] == "wait"]

    def alone(edge: Row) -> bool:  # another wait could order the same ops
        side = stream[edge["from"]]
        touched = {b for op in document["ops"] if op["stream"] == side for b in op["writes"]}
        read_there = bool(touched.intersection(document["ops"][edge["to"]]["reads"]))
        return edge["kind"] == "wait" and read_there and sum(stream[wait["from"]] == side for wait in waits) == 1

    chosen = _choose(document, "edges", pick, alone)
    if chosen is None:
        return None
    chosen[0]["edges"].remove(chosen[1])
    return chosen[0], "stream-race"


def reverse_edge(document: Document, pick: Pick) -> Broken:
    """Let a fork or wait point backwards."""
    chosen = _choose(document, "edges", pick)
    if chosen is None:
        return None
    edge = chosen[1]
    edge["from"], edge["to"] = edge["to"], edge["from"]
    return chosen[0], "edge"


def enlarge_gap(document: Document, pick: Pick) -> Broken:
    """Stretch a gap over the op before it that still reads the value, or over the next one that touches it."""
    chosen = _choose(document, "buffers", pick, lambda row: bool(row["gaps"]))
    if chosen is None:
        return None
    mutated, row = chosen
    gap = pick(row["gaps"])
    group = {row["id"], *(other["id"] for other in mutated["buffers"] if other["alias_of"] == row["id"])}
    touched = [op["index"] for op in mutated["ops"] if group.intersection((*op["reads"], *op["writes"]))]
    before, after = [i for i in touched if i < gap[0]], [i for i in touched if i >= gap[1]]
    if before and (not after or pick(["start", "end"]) == "start"):
        gap[0] = before[-1]
    elif after:
        gap[1] = after[0] + 1
    return (mutated, "gap") if before or after else None


def invent_gap(document: Document, pick: Pick) -> Broken:
    """Claim that a buffer holds nothing while an op touches it."""
    touched = {b for op in document["ops"] for b in (*op["reads"], *op["writes"])}
    chosen = _choose(document, "buffers", pick, lambda row: row["id"] in touched and not row["gaps"])
    if chosen is None:
        return None
    chosen[1]["gaps"] = [[chosen[1]["start"], chosen[1]["end"]]]
    return chosen[0], "gap"


def move_op(document: Document, pick: Pick) -> Broken:
    """Move an op out of its region, or into one."""
    chosen = _choose(document, "ops", pick, lambda row: row["region"] is not None or bool(document["regions"]))
    if chosen is None:
        return None
    mutated, row = chosen
    names = [None, *(region["name"] for region in mutated["regions"])]
    row["region"] = pick([name for name in names if name != row["region"]])
    return mutated, "region"


def change_region(document: Document, pick: Pick) -> Broken:
    """Let a region's chunks no longer cover its extent, or let it cover other ops."""
    chosen = _choose(document, "regions", pick)
    if chosen is None:
        return None
    key = pick(["count", "start", "end"])
    chosen[1][key] += 1 if key != "end" else -1
    return chosen[0], "region"


def change_slice(document: Document, pick: Pick) -> Broken:
    """Let an operand be sliced by other amounts than its axis has."""
    chosen = _choose(document, "ops", pick, lambda row: bool(row["slices"]))
    if chosen is None:
        return None
    pick(chosen[1]["slices"])[3] += 1
    return chosen[0], "slice"


def drop_producer(document: Document, pick: Pick) -> Broken:
    """Drop the write of a value that is read later."""
    buffers = document["buffers"]
    written = [b for op in document["ops"] for b in op["writes"]]
    read = {b for op in document["ops"] for b in op["reads"]}

    def produces(row: Row) -> bool:
        return any(
            buffers[b]["kind"] == "transient" and b in read and written.count(b) == 1 and b not in row["reads"]
            for b in row["writes"]
        )  # fmt: skip

    chosen = _choose(document, "ops", pick, produces)
    if chosen is None:
        return None
    row = chosen[1]
    b = pick([b for b in row["writes"] if buffers[b]["kind"] == "transient" and b in read and written.count(b) == 1])
    row["writes"].remove(b)
    row["operands"] = {operand: at for operand, at in row["operands"].items() if at != b}
    row["slices"] = [cut for cut in row["slices"] if cut[0] in row["operands"]]
    row["inplace"] = [pair for pair in row["inplace"] if pair[0] != b]
    return chosen[0], "read-before-write"


def rename(document: Document, pick: Pick) -> Broken:
    """Give two buffers one name."""
    if len(document["buffers"]) < 2:
        return None
    mutated = copy.deepcopy(document)
    a = pick(range(1, len(mutated["buffers"])))
    mutated["buffers"][a]["name"] = mutated["buffers"][0]["name"]
    return mutated, "duplicate-name"


def misplace(document: Document, pick: Pick) -> Broken:
    """Put a weight or a state into the workspace, which other plans share."""
    chosen = _choose(
        document, "buffers", pick, lambda row: row["kind"] in ("weight", "state") and row["alias_of"] is None
    )
    if chosen is None:
        return None
    chosen[1]["pool"] = "workspace"
    return chosen[0], "pool"


def drop_field(document: Document, pick: Pick) -> Broken:
    """Drop a field of the document or of one of its rows."""
    mutated = copy.deepcopy(document)
    rows = [
        mutated,
        *(row for key in ("ops", "buffers", "regions", "barriers", "edges", "pools") for row in mutated[key][:1]),
    ]
    row = pick(rows)
    del row[pick(sorted(set(row) - {"schema"}))]
    return mutated, "format"


def renumber(document: Document, pick: Pick) -> Broken:
    """Give a buffer another id."""
    chosen = _choose(document, "buffers", pick)
    if chosen is None:
        return None
    chosen[1]["id"] += 1
    return chosen[0], "id"


# Claims about the step: settings, dims, formula, trace, profile.


def _with(document: Document, **fields: Any) -> Document:
    mutated = copy.deepcopy(document)
    mutated.update(fields)
    return mutated


def exceed_context(document: Document, pick: Pick) -> Broken:
    """Claim a largest context below the one that this plan fits."""
    dims = document["dims"]
    if not document["fits"] or dims.get("seqs") != 1 or "tokens" not in dims:
        return None
    return _with(document, max_ctx_tokens=pick([0, dims["tokens"] - 1])), "context"


def break_number(document: Document, pick: Pick) -> Broken:
    """State a time, a context or a memory that is no such number."""
    key, value = pick(
        [
            ("predicted_step_ms", float("nan")), ("predicted_step_ms", -1), ("predicted_step_ms", float("inf")),
            ("max_ctx_tokens", -1), ("device_memory_bytes", -1), ("backend", "abacus"),
        ]
    )  # fmt: skip
    return _with(document, **{key: value}), "format"


def malform(document: Document, pick: Pick) -> Broken:
    """Put something else where entries, maps and numbers belong."""
    key, value = pick(
        [
            ("formula", [1]), ("formula", [{"expr": 1, "at": "x"}]), ("formula", [{"expr": "1"}]), ("formula", "42"),
            ("trace", ["x"]), ("trace", [{}]), ("mesh", {}), ("mesh", {"size": 0, "axes": {}}), ("mesh", {"size": 1}),
            ("dims", {**document["dims"], "tokens": 0}), ("dims", {"tokens": 1.5}), ("dims", {"tokens": True}),
            ("config", {**document["config"], "ffn": 0}), ("config", {"ffn": 0.5}),
            ("pools", [*document["pools"], {"name": "host", "device": "cpu", "capacity": -7}]),
        ]
    )  # fmt: skip
    return _with(document, **{key: value}), "format"


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
    chosen = _choose(document, "trace", pick, lambda row: row["config"] == document["config"])
    if chosen is None:
        return None
    mutated, row = chosen
    key = pick(["peak_bytes", "total_bytes", "predicted_ms", "bottleneck"])
    row[key] = "nowhere" if key == "bottleneck" else row[key] + 512
    return mutated, "trace"


def forget_knob_in_trace(document: Document, pick: Pick) -> Broken:
    """Let a search step or the plan have a knob less."""
    chosen = _choose(document, "trace", pick, lambda row: bool(row["config"]))
    if chosen is None:
        return None
    del chosen[1]["config"][pick(sorted(chosen[1]["config"]))]
    return chosen[0], "config"


def change_knob(document: Document, pick: Pick) -> Broken:
    """Drop a knob that is on, turn it off, give it other rows, or invent one."""
    on = sorted({row["knob"] for row in document["regions"]})
    if not on:
        return _with(document, config={**document["config"], "bananas": 128}), "config"
    config, knob = dict(document["config"]), pick(on)
    how = pick(["drop", "off", "more", "option", "invent"])
    if how == "drop":
        del config[knob]
    else:
        new = {"off": None, "more": config[knob] + 1, "option": "fused", "invent": 128}[how]
        config["bananas" if how == "invent" else knob] = new
    return _with(document, config=config), "config"


def change_dim(document: Document, pick: Pick) -> Broken:
    """Drop the dims, or state another number of tokens, masked rows, sequences or rows of logits."""
    if document["phase"] != "full_step":
        return None
    dims = dict(document["dims"])
    dim = pick([None, *sorted(dims.keys() - {"pairs"})])
    if dim is None:
        return _with(document, dims={}), "dims"
    dims[dim] += 7919
    return _with(document, dims=dims), "dims"


def change_pairs(document: Document, pick: Pick) -> Broken:
    """State another number of query-key pairs than attention's FLOPs have."""
    if not any(row["kernel"] == "attention" for row in document["ops"]):
        return None
    pairs = pick([1, document["dims"]["pairs"] + 1, 2 * document["dims"]["pairs"]])
    if pairs == document["dims"]["pairs"]:
        return None
    return _with(document, dims={**document["dims"], "pairs": pairs}), "flops"


def change_profile(document: Document, pick: Pick) -> Broken:
    """State another mesh, or a memory that context and libraries do not fit in."""
    how = pick(["mesh", "axes", "device"])
    if how == "device":
        small = document["components"]["context"] + document["components"]["library"]
        return _with(document, device_memory_bytes=pick([0, small])), "device"
    mesh = {"size": 8, "axes": document["mesh"]["axes"]} if how == "mesh" else {"size": 1, "axes": {"tensor": 8}}
    return _with(document, mesh=mesh), "mesh"


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
    chosen = _choose(document, "regions", pick)
    if chosen is None:
        return None
    chosen[1]["dim"] = "bananas"
    return chosen[0], "dims"


def stretch_region(document: Document, pick: Pick) -> Broken:
    """Let a loop run over another chunk than its dim has, its count adjusted."""
    chosen = _choose(document, "regions", pick)
    if chosen is None:
        return None
    chosen[1]["extent"] += chosen[1]["rows"]
    chosen[1]["count"] += 1
    return chosen[0], "dims"


# Operators, also consistently in several fields.

_OWN = "mix"  # the kernel of the examples' ops, of which the checker knows nothing


def _known(row: Row) -> bool:
    return bool(row["kernel"] != _OWN)


def settle_totals(document: Document) -> None:
    """Adjust peak, bounds, components, pools and total to the buffers' sizes and lifetimes."""
    page, components = document["page_bytes"], document["components"]
    roots = [row for row in document["buffers"] if row["pool"] == "workspace" and row["alias_of"] is None]
    live = [
        sum(r["size"] for r in roots if r["start"] <= t < r["end"] and not any(a <= t < b for a, b in r["gaps"]))
        for t in range(len(document["ops"]))
    ]  # fmt: skip
    for pool in document["pools"]:
        tops = [row["offset"] + row["size"] for row in document["buffers"] if row["pool"] == pool["name"]]
        pool["capacity"] = components[pool["name"]] = -(-max(tops, default=0) // page) * page
    peak = max((row["offset"] + row["size"] for row in roots), default=0)
    document.update(peak_bytes=peak, lower_bound_bytes=max(live), optimal=peak == max(live))
    document["total_bytes"] = sum(components.values())
    document["fits"] = document["total_bytes"] <= document["budget_bytes"]


def _halve(row: Row) -> None:
    row["shape"][-1] //= 2
    row["size"] = -(-(row["size"] // 2) // 512) * 512


def _touched_by_known(document: Document) -> set[int]:
    known = [row for row in document["ops"] if _known(row)]
    return {b for row in known for name, b in row["operands"].items() if name != "scratch"}


def halve_width(document: Document, pick: Pick) -> Broken:
    """Halve the width of an activation, all totals adjusted."""
    roots, touched = {row["alias_of"] for row in document["buffers"]}, _touched_by_known(document)

    def suits(row: Row) -> bool:
        alone = row["alias_of"] is None and row["id"] not in roots
        return alone and row["id"] in touched and row["pool"] == "workspace" and len(row["shape"]) == 2

    chosen = _choose(document, "buffers", pick, lambda row: suits(row) and row["shape"][-1] % 2 == 0)
    if chosen is None:
        return None
    _halve(chosen[1])
    settle_totals(chosen[0])
    return chosen[0], "operator"


def halve_weight(document: Document, pick: Pick) -> Broken:
    """Halve a weight, all totals adjusted."""
    touched = _touched_by_known(document)
    chosen = _choose(
        document, "buffers", pick,
        lambda row: row["kind"] == "weight" and row["id"] in touched and row["shape"][-1] % 2 == 0
        and not (row["tensor"] or "").startswith("="),  # rotary may turn any part of a head
    )  # fmt: skip
    if chosen is None:
        return None
    _halve(chosen[1])
    settle_totals(chosen[0])
    return chosen[0], "operator"


def drop_loop(document: Document, pick: Pick) -> Broken:
    """Take a knob's loops out of everything that names them, so that chunks face whole tensors."""
    home = {row["id"]: row["region"] for row in document["buffers"]}

    def mixes(name: str) -> bool:  # chunks and slices in one op
        return any(
            len({home[row["operands"][cut[0]]] == name for cut in row["slices"] if cut[2] == name}) == 2
            for row in document["ops"]
            if _known(row)
        )

    knobs = sorted({row["knob"] for row in document["regions"] if mixes(row["name"])})
    if not knobs:
        return None
    knob = pick(knobs)
    mutated = copy.deepcopy(document)
    parent = {row["name"]: row["parent"] for row in mutated["regions"] if row["knob"] == knob}
    mutated["regions"] = [row for row in mutated["regions"] if row["name"] not in parent]
    mutated["barriers"] = [row for row in mutated["barriers"] if row["region"] not in parent]
    for row in (*mutated["ops"], *mutated["buffers"]):
        row["region"] = parent.get(row["region"], row["region"])
    for row in mutated["ops"]:
        row["slices"] = [cut for cut in row["slices"] if cut[2] not in parent]
    mutated["config"][knob] = None
    return mutated, "operator"


def drop_slice(document: Document, pick: Pick) -> Broken:
    """Let an operand no longer be sliced with the others."""
    chosen = _choose(
        document,
        "ops",
        pick,
        lambda row: _known(row) and len({tuple(cut[1:]) for cut in row["slices"]}) == 1 and len(row["slices"]) > 1,
    )
    if chosen is None:
        return None
    row = chosen[1]
    row["slices"].remove(pick([cut for cut in row["slices"] if cut[0] != "scratch"]))
    return chosen[0], "operator"


def break_attribute(document: Document, pick: Pick) -> Broken:
    """Drop attributes, or change a count of heads or experts."""
    chosen = _choose(document, "ops", pick, lambda row: _known(row) and bool(row["attrs"]))
    if chosen is None:
        return None
    row = chosen[1]
    counts = sorted(row["attrs"].keys() & {"heads", "head_size", "top_k", "num_experts"})
    how = pick(["clear", "invent", "type", *counts])
    if how == "clear":
        row["attrs"] = {}
    elif how == "invent":
        row["attrs"]["bananas"] = 1
    elif how == "type":
        row["attrs"][pick(sorted(row["attrs"]))] = "8"
    else:
        row["attrs"][how] += 1
    return chosen[0], "operator"


def break_dtype(document: Document, pick: Pick) -> Broken:
    """Give indices a floating-point dtype of as many bytes."""
    names = ("ids", "rows", "token", "order")
    chosen = _choose(document, "ops", pick, lambda row: _known(row) and any(name in row["operands"] for name in names))
    if chosen is None:
        return None
    name = pick([name for name in names if name in chosen[1]["operands"]])
    chosen[0]["buffers"][chosen[1]["operands"][name]]["dtype"] = "float64"
    return chosen[0], "operator"


def rename_operand(document: Document, pick: Pick) -> Broken:
    """Give an operand a name that its operator does not have."""
    chosen = _choose(document, "ops", pick, lambda row: _known(row) and not row["slices"])
    if chosen is None:
        return None
    operands = chosen[1]["operands"]
    operands["bananas"] = operands.pop(pick(sorted(operands)))
    return chosen[0], "operator"


def forget_update(document: Document, pick: Pick) -> Broken:
    """Let an op that updates an operand no longer read it."""
    chosen = _choose(document, "ops", pick, lambda row: _known(row) and bool(set(row["reads"]) & set(row["writes"])))
    if chosen is None:
        return None
    row = chosen[1]
    row["reads"].remove(pick(sorted(set(row["reads"]) & set(row["writes"]))))
    return chosen[0], "operands"


def change_work(document: Document, pick: Pick) -> Broken:
    """State no FLOPs or bytes, or others."""
    key = pick(["flops", "bytes"])
    chosen = _choose(document, "ops", pick, lambda row: _known(row) and row[key] > 0)
    if chosen is None:
        return None
    chosen[1][key] = pick([0, chosen[1][key] + 1, chosen[1][key] // 2])
    return chosen[0], key


MUTATIONS: Mapping[str, Mutation] = {
    mutate.__name__: mutate
    for mutate in (
        misalign, collide, leave_pool, shorten_lifetime, lengthen_lifetime, drop_region_barrier, drop_explicit_barrier,
        drop_barrier_buffer, swap_barrier_lists, move_barrier, shift_alias, detach_alias, forbid_inplace, change_size,
        change_shape, change_peak, change_lower_bound, claim_optimal, change_component, change_total, flip_fits,
        drop_edge, reverse_edge, enlarge_gap, invent_gap, move_op, change_region, change_slice, drop_producer, rename,
        misplace, drop_field, renumber, exceed_context, break_number, malform, break_formula, shrink_formula,
        contradict_trace, forget_knob_in_trace, change_knob, change_dim, change_pairs, change_profile, change_pool,
        rename_region_dim, stretch_region, halve_width, halve_weight, drop_loop, drop_slice, break_attribute,
        break_dtype, rename_operand, forget_update, change_work,
    )
}  # fmt: skip
