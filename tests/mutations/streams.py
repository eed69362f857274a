"""Break what orders side ops with main, with each other and with other iterations of a loop."""

from __future__ import annotations

import copy

from mutations.choosing import Broken, Document, Pick, Row, choose, settle_totals


def _orders_alone(document: Document, edge: Row) -> bool:
    """Whether nothing but an edge orders its two ops, of which one writes what the other touches.

    Another edge between their streams might, or a border of a loop, at which side streams fork and join.
    """
    ops = document["ops"]
    a, b = ops[edge["from"]], ops[edge["to"]]
    others = [
        other
        for other in document["edges"]
        if other is not edge
        and (ops[other["from"]]["stream"], ops[other["to"]]["stream"]) == (a["stream"], b["stream"])
        and other["from"] >= a["index"]
        and other["to"] <= b["index"]
    ]
    borders = [
        border
        for row in document["regions"]
        for border in (row["start"], row["end"])
        if any(op["region"] == row["name"] and op["stream"] != "main" for op in ops)
    ]
    common = {*a["writes"]}.intersection((*b["reads"], *b["writes"])) | {*b["writes"]}.intersection(a["reads"])
    return bool(common) and not others and not any(a["index"] < border <= b["index"] for border in borders)


def drop_edge(document: Document, pick: Pick) -> Broken:
    """Drop one fork or wait that alone orders a side op with main."""
    chosen = choose(document, "edges", pick, lambda edge: _orders_alone(document, edge))
    if chosen is None:
        return None
    chosen[0]["edges"].remove(chosen[1])
    return chosen[0], "stream-race"


def wait_late(document: Document, pick: Pick) -> Broken:
    """Let a later op of main wait instead of the one that needs what a side op does."""
    main = [op["index"] for op in document["ops"] if op["stream"] == "main"]

    def suits(edge: Row) -> bool:
        return edge["kind"] == "wait" and _orders_alone(document, edge) and main[-1] > edge["to"]

    chosen = choose(document, "edges", pick, suits)
    if chosen is None:
        return None
    edge = chosen[1]
    edge["to"] = pick([i for i in main if i > edge["to"]])
    return chosen[0], "stream-race"


def fork_early(document: Document, pick: Pick) -> Broken:
    """Fork a side op from an earlier op of main than the one that writes or reads what it touches."""
    main = [op["index"] for op in document["ops"] if op["stream"] == "main"]

    def suits(edge: Row) -> bool:
        return edge["kind"] == "fork" and _orders_alone(document, edge) and main[0] < edge["from"]

    chosen = choose(document, "edges", pick, suits)
    if chosen is None:
        return None
    edge = chosen[1]
    edge["from"] = pick([i for i in main if i < edge["from"]])
    return chosen[0], "stream-race"


def _overlapping(document: Document) -> list[tuple[Row, Row]]:
    """Side ops that run beside other iterations of their loop, each with that loop.

    Those that edges both fork and join within an iteration do not; an edge may do so for another op of its stream.
    """
    loops = {row["name"]: row for row in document["regions"]}
    ops, found = document["ops"], []
    for op in ops:
        loop = loops.get(op["region"])
        if op["stream"] == "main" or loop is None or loop["count"] < 2:
            continue
        inside = range(loop["start"], loop["end"])
        edges = [edge for edge in document["edges"] if edge["from"] in inside and edge["to"] in inside]
        on_stream = [
            (edge["kind"], edge["from"] if edge["kind"] == "wait" else edge["to"])
            for edge in edges
            if op["stream"] in (ops[edge["from"]]["stream"], ops[edge["to"]]["stream"])
        ]
        forked = any(kind == "fork" and side <= op["index"] for kind, side in on_stream)
        joined = any(kind == "wait" and side >= op["index"] for kind, side in on_stream)
        nested = any(row["parent"] == loop["name"] for row in document["regions"])
        if not (forked and joined) and not nested:
            found.append((op, loop))
    return found


def _pick_window(document: Document, pick: Pick) -> tuple[Document, Row, Row] | None:
    """Copy a document and pick a rotating buffer that a side op of a loop touches, and the loop."""
    windows = [
        (b, loop["name"])
        for op, loop in _overlapping(document)
        for b in {*op["reads"], *op["writes"]}
        if document["buffers"][b]["region"] == loop["name"]
    ]
    if not windows:
        return None
    b, name = pick(windows)
    mutated = copy.deepcopy(document)
    return mutated, mutated["buffers"][b], next(row for row in mutated["regions"] if row["name"] == name)


def take_slot(document: Document, pick: Pick) -> Broken:
    """Give what a side op of a loop touches one slot, all totals adjusted."""
    chosen = _pick_window(document, pick)
    if chosen is None:
        return None
    mutated, row, _ = chosen
    row["size"] //= row["rotate"]
    row["rotate"] = 1
    settle_totals(mutated)
    return mutated, "stream-race"


def evict_window(document: Document, pick: Pick) -> Broken:
    """Let all iterations of a loop share a window that a side op of theirs touches: its home is outside the loop."""
    chosen = _pick_window(document, pick)
    if chosen is None:
        return None
    mutated, row, loop = chosen
    row["region"] = loop["parent"]
    for op in mutated["ops"]:
        op["slices"] = [cut for cut in op["slices"] if op["operands"][cut[0]] != row["id"] or cut[2] != loop["name"]]
    touching = [op for op in mutated["ops"] if row["id"] in (*op["reads"], *op["writes"])]
    listed = "outputs" if any(row["id"] in op["writes"] for op in touching) else "inputs"
    next(barrier for barrier in mutated["barriers"] if barrier["region"] == loop["name"])[listed].append(row["id"])
    return mutated, "stream-race"


def carry_window(document: Document, pick: Pick) -> Broken:
    """Read a slot that rotates before it is written: what it holds is of an iteration before the last."""
    chosen = _pick_window(document, pick)
    if chosen is None:
        return None
    mutated, row, _ = chosen
    first = next(op for op in mutated["ops"] if row["id"] in (*op["reads"], *op["writes"]))
    if row["id"] not in first["reads"]:
        first["reads"].append(row["id"])
    return mutated, "read-before-write"


def unslice(document: Document, pick: Pick) -> Broken:
    """Let an op of a loop see all rows of what a side op of another iteration writes, or the side op itself."""
    shared = [
        (op["index"], cut)
        for side, loop in _overlapping(document)
        for b in {*side["reads"], *side["writes"]}
        if any(b in op["writes"] for op in document["ops"][loop["start"] : loop["end"]])
        for op in document["ops"][loop["start"] : loop["end"]]
        for cut in op["slices"]
        if op["operands"][cut[0]] == b and cut[2] == loop["name"] and document["buffers"][b]["region"] != loop["name"]
    ]
    if not shared:
        return None
    index, cut = pick(shared)
    mutated = copy.deepcopy(document)
    mutated["ops"][index]["slices"].remove(cut)
    return mutated, "stream-race"


def share_slot(document: Document, pick: Pick) -> Broken:
    """Put what one side op fetches where another's is still in use."""
    written = [
        b for op in document["ops"] if op["stream"] != "main" for b in op["writes"]
        if document["buffers"][b]["pool"] == "workspace"
    ]  # fmt: skip
    rows = [document["buffers"][b] for b in dict.fromkeys(written)]
    pairs = [
        (a["id"], b["id"])
        for a in rows
        for b in rows
        if a is not b and max(a["start"], b["start"]) < min(a["end"], b["end"])
    ]
    if not pairs:
        return None
    a, b = pick(pairs)
    mutated = copy.deepcopy(document)
    mutated["buffers"][a]["offset"] = mutated["buffers"][b]["offset"]
    return mutated, "overlap"


def fetch_early(document: Document, pick: Pick) -> Broken:
    """Issue a fetch while its slot still holds what an op reads: an earlier fork, lifetimes adjusted."""
    buffers, ops = document["buffers"], document["ops"]
    main = [op["index"] for op in ops if op["stream"] == "main"]
    found = []
    for k, edge in enumerate(document["edges"]):
        side = ops[edge["to"]]
        if edge["kind"] != "fork" or side["region"] is not None:
            continue
        forks = [other for other in document["edges"] if other["kind"] == "fork" and other["to"] <= edge["to"]]
        lane = [other["from"] for other in forks if ops[other["to"]]["stream"] == side["stream"] and other is not edge]
        least = max(lane, default=0)  # a stream goes on from the latest of its forks
        for slot in (buffers[b] for b in side["writes"] if buffers[b]["pool"] == "workspace"):
            for other in buffers:
                apart = other["end"] <= slot["start"] and other["pool"] == "workspace"
                below = other["offset"] < slot["offset"] + slot["size"]
                above = slot["offset"] < other["offset"] + other["size"]
                found += [
                    (k, slot["id"], i) for i in main if apart and below and above and least <= i < other["end"] - 1
                ]
    if not found:
        return None
    k, b, fork = pick(found)
    mutated = copy.deepcopy(document)
    mutated["edges"][k]["from"] = fork
    mutated["buffers"][b]["start"] = fork + 1
    return mutated, "overlap"


def reverse_edge(document: Document, pick: Pick) -> Broken:
    """Let a fork or wait point backwards."""
    chosen = choose(document, "edges", pick)
    if chosen is None:
        return None
    edge = chosen[1]
    edge["from"], edge["to"] = edge["to"], edge["from"]
    return chosen[0], "edge"


MUTATIONS = (
    drop_edge,
    wait_late,
    fork_early,
    take_slot,
    evict_window,
    carry_window,
    unslice,
    share_slot,
    fetch_early,
    reverse_edge,
)
