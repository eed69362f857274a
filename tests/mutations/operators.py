"""Break launches of shipped operators, also consistently in several fields."""

from __future__ import annotations

import copy

from mutations.choosing import Broken, Document, Pick, Row, choose, settle_totals

OWN = "mix"  # the kernel of the examples' ops, of which the checker knows nothing


def _known(row: Row) -> bool:
    return bool(row["kernel"] != OWN)


def _halve(row: Row) -> None:
    row["shape"][-1] //= 2
    row["size"] = -(-(row["size"] // 2) // 512) * 512


def _touched_by_known(document: Document) -> set[int]:
    known = [row for row in document["ops"] if _known(row)]
    return {b for row in known for name, b in row["operands"].items() if name != "scratch"}


def _halvable(document: Document) -> set[int]:
    """Operands of shipped operators whose last axis is even and that no loop slices there."""
    buffers = document["buffers"]
    cut = {
        row["operands"][name]
        for row in document["ops"]
        for name, axis, _, _ in row["slices"]
        if axis == len(buffers[row["operands"][name]]["shape"]) - 1
    }
    touched = _touched_by_known(document) - cut
    return {b for b in touched if buffers[b]["shape"] and buffers[b]["shape"][-1] % 2 == 0}


def halve_width(document: Document, pick: Pick) -> Broken:
    """Halve the width of an activation, all totals adjusted."""
    roots, halvable = {row["alias_of"] for row in document["buffers"]}, _halvable(document)

    def suits(row: Row) -> bool:
        alone = row["alias_of"] is None and row["id"] not in roots
        return alone and row["id"] in halvable and row["pool"] == "workspace" and len(row["shape"]) == 2

    chosen = choose(document, "buffers", pick, suits)
    if chosen is None:
        return None
    _halve(chosen[1])
    settle_totals(chosen[0])
    return chosen[0], "operator"


def halve_weight(document: Document, pick: Pick) -> Broken:
    """Halve a weight, all totals adjusted."""
    halvable = _halvable(document)
    chosen = choose(
        document, "buffers", pick,
        lambda row: row["kind"] == "weight" and row["id"] in halvable
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
    for row in mutated["regions"]:
        row["parent"] = parent.get(row["parent"], row["parent"])
    mutated["barriers"] = [row for row in mutated["barriers"] if row["region"] not in parent]
    for row in (*mutated["ops"], *mutated["buffers"]):
        row["region"] = parent.get(row["region"], row["region"])
    for row in mutated["ops"]:
        row["slices"] = [cut for cut in row["slices"] if cut[2] not in parent]
    mutated["config"][knob] = None
    return mutated, "operator"


def drop_slice(document: Document, pick: Pick) -> Broken:
    """Let an operand no longer be sliced with the others."""
    chosen = choose(
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
    chosen = choose(document, "ops", pick, lambda row: _known(row) and bool(row["attrs"]))
    if chosen is None:
        return None
    row = chosen[1]
    counts = sorted(row["attrs"].keys() & {"head_size", "top_k", "num_experts"})
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
    chosen = choose(document, "ops", pick, lambda row: _known(row) and any(name in row["operands"] for name in names))
    if chosen is None:
        return None
    name = pick([name for name in names if name in chosen[1]["operands"]])
    chosen[0]["buffers"][chosen[1]["operands"][name]]["dtype"] = "float64"
    return chosen[0], "operator"


def rename_operand(document: Document, pick: Pick) -> Broken:
    """Give an operand a name that its operator does not have."""
    chosen = choose(document, "ops", pick, lambda row: _known(row) and not row["slices"])
    if chosen is None:
        return None
    operands = chosen[1]["operands"]
    operands["bananas"] = operands.pop(pick(sorted(operands)))
    return chosen[0], "operator"


def move_to_host(document: Document, pick: Pick) -> Broken:
    """Put a weight that a kernel reads at the device's speed into host memory, all totals adjusted."""
    reached = {("embedding", "table"), ("gather_rows", "x"), ("copy", "x"), ("copy", "y")}
    bare = {
        b for row in document["ops"] if _known(row) for name, b in row["operands"].items()
        if (row["kernel"], name) not in reached
    }  # fmt: skip
    chosen = choose(document, "buffers", pick, lambda row: row["kind"] == "weight" and row["id"] in bare)
    if chosen is None:
        return None
    mutated, row = chosen
    row.update(pool="host", offset=-(-mutated["host_bytes"] // 512) * 512)
    settle_totals(mutated)
    return mutated, "operator"


def forget_update(document: Document, pick: Pick) -> Broken:
    """Let an op that updates an operand no longer read it."""
    chosen = choose(document, "ops", pick, lambda row: _known(row) and bool(set(row["reads"]) & set(row["writes"])))
    if chosen is None:
        return None
    row = chosen[1]
    row["reads"].remove(pick(sorted(set(row["reads"]) & set(row["writes"]))))
    return chosen[0], "operands"


def change_work(document: Document, pick: Pick) -> Broken:
    """State no FLOPs or bytes, or others."""
    key = pick(["flops", "bytes"])
    chosen = choose(document, "ops", pick, lambda row: _known(row) and row[key] > 0)
    if chosen is None:
        return None
    chosen[1][key] = pick([0, chosen[1][key] + 1, chosen[1][key] // 2])
    return chosen[0], key


MUTATIONS = (
    halve_width,
    halve_weight,
    drop_loop,
    drop_slice,
    break_attribute,
    break_dtype,
    rename_operand,
    move_to_host,
    forget_update,
    change_work,
)
