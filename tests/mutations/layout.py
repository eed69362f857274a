"""Break regions, lifetimes, barriers, aliases, addresses and totals."""

from __future__ import annotations

import copy

from mutations.choosing import Broken, Document, Pick, Row, choose

PAGED = ("workspace", "weights", "state")


def _placed(row: Row) -> bool:
    return row["pool"] != "external"


def misalign(document: Document, pick: Pick) -> Broken:
    """Shift an offset by less than the alignment."""
    chosen = choose(document, "buffers", pick, _placed)
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
    chosen = choose(document, "buffers", pick, _placed)
    if chosen is None:
        return None
    mutated, row = chosen
    row["offset"] = next(pool["capacity"] for pool in mutated["pools"] if pool["name"] == row["pool"])
    return mutated, "pool-bounds"


def shorten_lifetime(document: Document, pick: Pick) -> Broken:
    """Take ops off either end of a lifetime."""
    chosen = choose(document, "buffers", pick, lambda row: row["end"] > row["start"])
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
    chosen = choose(document, "buffers", pick, lambda row: row["start"] > 0 or row["end"] < len(document["ops"]))
    if chosen is None:
        return None
    row = chosen[1]
    if row["end"] == len(document["ops"]) or (row["start"] and pick(["start", "end"]) == "start"):
        row["start"] -= 1
    else:
        row["end"] += 1
    return chosen[0], "lifetime-long"


def drop_region_barrier(document: Document, pick: Pick) -> Broken:
    """Drop the barrier of a region."""
    chosen = choose(document, "barriers", pick, lambda row: row["region"] is not None)
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

    chosen = choose(document, "barriers", pick, alone)
    if chosen is None:
        return None
    chosen[0]["barriers"].remove(chosen[1])
    return chosen[0], "lifetime-long"


def drop_barrier_buffer(document: Document, pick: Pick) -> Broken:
    """Drop a buffer from a region's barrier."""
    lists = ("inputs", "outputs", "carried")
    chosen = choose(
        document, "barriers", pick, lambda row: row["region"] is not None and any(row[key] for key in lists)
    )
    if chosen is None:
        return None
    chosen[1][pick([key for key in lists if chosen[1][key]])].pop()
    return chosen[0], "barrier-mismatch"


def swap_barrier_lists(document: Document, pick: Pick) -> Broken:
    """Exchange the inputs and outputs of a region's barrier."""
    chosen = choose(
        document, "barriers", pick, lambda row: row["region"] is not None and row["inputs"] != row["outputs"]
    )
    if chosen is None:
        return None
    row = chosen[1]
    row["inputs"], row["outputs"] = row["outputs"], row["inputs"]
    return chosen[0], "barrier-mismatch"


def move_barrier(document: Document, pick: Pick) -> Broken:
    """Let a region's barrier end an op early."""
    chosen = choose(document, "barriers", pick, lambda row: row["region"] is not None and row["end"] - row["start"] > 1)
    if chosen is None:
        return None
    chosen[1]["end"] -= 1
    return chosen[0], "barrier-mismatch"


def shift_alias(document: Document, pick: Pick) -> Broken:
    """Move an alias away from its root."""
    chosen = choose(document, "buffers", pick, lambda row: row["alias_of"] is not None)
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

    chosen = choose(document, "buffers", pick, reaches_end)
    if chosen is None:
        return None
    chosen[1].update(alias_of=None, alias_offset=0)
    return chosen[0], "lifetime-long"


def forbid_inplace(document: Document, pick: Pick) -> Broken:
    """Take from an op the permission to overwrite an alias that it reads."""
    buffers = document["buffers"]
    roots = [b if row["alias_of"] is None else row["alias_of"] for b, row in enumerate(buffers)]
    chosen = choose(document, "ops", pick, lambda row: any(roots[a] == roots[b] for a, b in row["inplace"]))
    if chosen is None:
        return None
    chosen[1]["inplace"] = []
    return chosen[0], "alias-stale-read"


def change_size(document: Document, pick: Pick) -> Broken:
    """Change a size: too small, or larger than the shape and the aliases explain."""
    chosen = choose(document, "buffers", pick, lambda row: _placed(row) and row["size"] > 0)
    if chosen is None:
        return None
    chosen[1]["size"] += pick([-512, -1, 1, 512])
    return chosen[0], "size"


def change_shape(document: Document, pick: Pick) -> Broken:
    """Let a shape need more bytes than its buffer has."""
    chosen = choose(document, "buffers", pick, lambda row: bool(row["shape"]) and row["size"] > 0)
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
    mutated["components"][pick(list(PAGED))] += mutated["page_bytes"]
    return mutated, "components"


def change_host(document: Document, pick: Pick) -> Broken:
    """State more pages of the host."""
    mutated = copy.deepcopy(document)
    mutated["host_bytes"] += mutated["page_bytes"]
    return mutated, "host"


def change_total(document: Document, pick: Pick) -> Broken:
    """State another total."""
    mutated = copy.deepcopy(document)
    mutated["total_bytes"] += pick([1, 4096])
    return mutated, "total"


def flip_fits(document: Document, pick: Pick) -> Broken:
    """Flip the verdict, or take a budget away from under it."""
    mutated = copy.deepcopy(document)
    options = ["flip"]
    if mutated["fits"]:
        options += ["budget", "host"] if mutated["host_bytes"] else ["budget"]
    how = pick(options)
    if how == "budget":
        mutated["budget_bytes"] = mutated["total_bytes"] - 1
    elif how == "host":
        mutated["host_budget_bytes"] = mutated["host_bytes"] - 1
    else:
        mutated["fits"] = not mutated["fits"]
    return mutated, "fits"


def enlarge_gap(document: Document, pick: Pick) -> Broken:
    """Stretch a gap over the op before it that still reads the value, or over the next one that touches it."""
    chosen = choose(document, "buffers", pick, lambda row: bool(row["gaps"]))
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
    chosen = choose(document, "buffers", pick, lambda row: row["id"] in touched and not row["gaps"])
    if chosen is None:
        return None
    chosen[1]["gaps"] = [[chosen[1]["start"], chosen[1]["end"]]]
    return chosen[0], "gap"


def move_op(document: Document, pick: Pick) -> Broken:
    """Move an op out of its region, or into one."""
    chosen = choose(document, "ops", pick, lambda row: row["region"] is not None or bool(document["regions"]))
    if chosen is None:
        return None
    mutated, row = chosen
    names = [None, *(region["name"] for region in mutated["regions"])]
    row["region"] = pick([name for name in names if name != row["region"]])
    return mutated, "region"


def change_region(document: Document, pick: Pick) -> Broken:
    """Let a region's chunks no longer cover its extent, or let it cover other ops."""
    chosen = choose(document, "regions", pick)
    if chosen is None:
        return None
    key = pick(["count", "start", "end"])
    chosen[1][key] += 1 if key != "end" else -1
    return chosen[0], "region"


def change_slice(document: Document, pick: Pick) -> Broken:
    """Let an operand be sliced by other amounts than its axis has."""
    chosen = choose(document, "ops", pick, lambda row: bool(row["slices"]))
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

    chosen = choose(document, "ops", pick, produces)
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
    chosen = choose(
        document, "buffers", pick, lambda row: row["kind"] in ("weight", "state") and row["alias_of"] is None
    )
    if chosen is None:
        return None
    chosen[1]["pool"] = "workspace"
    return chosen[0], "pool"


def drop_field(document: Document, pick: Pick) -> Broken:
    """Drop a field of the document or of one of its rows; without `declared` a plan proves less, and says so, and not every
    plan has a `capability`."""
    mutated = copy.deepcopy(document)
    rows = [
        mutated,
        *(row for key in ("ops", "buffers", "regions", "barriers", "edges", "pools") for row in mutated[key][:1]),
    ]
    row = pick(rows)
    del row[pick(sorted(set(row) - {"schema", "declared", "capability"}))]
    return mutated, "format"


def renumber(document: Document, pick: Pick) -> Broken:
    """Give a buffer another id."""
    chosen = choose(document, "buffers", pick)
    if chosen is None:
        return None
    chosen[1]["id"] += 1
    return chosen[0], "id"


MUTATIONS = (
    misalign,
    collide,
    leave_pool,
    shorten_lifetime,
    lengthen_lifetime,
    drop_region_barrier,
    drop_explicit_barrier,
    drop_barrier_buffer,
    swap_barrier_lists,
    move_barrier,
    shift_alias,
    detach_alias,
    forbid_inplace,
    change_size,
    change_shape,
    change_peak,
    change_lower_bound,
    claim_optimal,
    change_component,
    change_host,
    change_total,
    flip_fits,
    enlarge_gap,
    invent_gap,
    move_op,
    change_region,
    change_slice,
    drop_producer,
    rename,
    misplace,
    drop_field,
    renumber,
)
