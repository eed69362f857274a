"""Plans that the checker accepts have no race, by unrolling every iteration of every loop; side ops moved about at random."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from plan_examples import EXAMPLES
from plan_mutations import MUTATIONS, settle_totals
from plan_races import races

from mosaic.planner.check import check_plan
from mosaic.planner.check.lifetimes import derive_lifetimes
from mosaic.planner.check.reading import read_document, read_skeleton
from mosaic.planner.check.safety import check_structure

Document = dict[str, Any]
Row = dict[str, Any]

STREAMS = ("main", "fetch", "store")
WITH_SIDE_OPS = sorted(name for name, build in EXAMPLES.items() if any(op["stream"] != "main" for op in build()["ops"]))


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_have_no_race(name: str) -> None:
    assert races(EXAMPLES[name]()) == []


@pytest.mark.parametrize("mutation", ["drop_edge", "wait_late", "fork_early", "evict_window", "unslice", "share_slot"])
def test_the_long_way_round_finds_races(mutation: str) -> None:
    """Each case has a race, some only between two iterations; ops of one stream may see each other's rows."""
    found = []
    for name in WITH_SIDE_OPS:
        for seed in range(4):
            broken = MUTATIONS[mutation](EXAMPLES[name](), random.Random(seed).choice)
            if broken is not None:
                found.append(bool(races(broken[0])))
    assert any(found) if mutation == "unslice" else all(found)
    assert found


@pytest.mark.some
@pytest.mark.parametrize("name", WITH_SIDE_OPS)
def test_what_is_accepted_has_no_race(name: str) -> None:
    rng = random.Random(name)
    accepted = refused = 0
    for _ in range(150):
        document = EXAMPLES[name]()
        for _ in range(rng.randint(1, 3)):
            rng.choice(DISTURBANCES)(document, rng)
        if not settle(document, rng):
            continue
        codes = {violation.code for violation in check_plan(document)}
        accepted += not codes
        refused += codes == {"stream-race"}
        if not codes:
            assert races(document) == []
    assert accepted
    assert refused


# Disturbances: what a wrong planner might say of streams, loops and slots.


def move_to_stream(document: Document, rng: random.Random) -> None:
    op = rng.choice(document["ops"])
    op["stream"] = rng.choice(STREAMS)


def add_edge(document: Document, rng: random.Random) -> None:
    ops = document["ops"]
    pairs = [(a, b) for a in ops for b in ops if a["index"] < b["index"] and a["stream"] != b["stream"]]
    sound = [(a["index"], b["index"], a["stream"]) for a, b in pairs if "main" in (a["stream"], b["stream"])]
    if sound:
        start, end, stream = rng.choice(sound)
        document["edges"].append({"kind": "fork" if stream == "main" else "wait", "from": start, "to": end})


def remove_edge(document: Document, rng: random.Random) -> None:
    if document["edges"]:
        document["edges"].remove(rng.choice(document["edges"]))


def change_slots(document: Document, rng: random.Random) -> None:
    homes = [row for row in document["buffers"] if row["region"] is not None and row["alias_of"] is None]
    if homes:
        row, slots = rng.choice(homes), rng.randint(1, 3)
        row["size"] = row["size"] // row["rotate"] * slots
        row["rotate"] = slots


def change_home(document: Document, rng: random.Random) -> None:
    """Move a buffer's home outwards, its shape with it where it was sliced."""
    homes = [row for row in document["buffers"] if row["region"] is not None]
    if not homes:
        return
    row = rng.choice(homes)
    loop = next(loop for loop in document["regions"] if loop["name"] == row["region"])
    row["region"] = loop["parent"]
    cuts = [
        (op, cut) for op in document["ops"] for cut in op["slices"]
        if op["operands"][cut[0]] == row["id"] and cut[2] == loop["name"]
    ]  # fmt: skip
    if rng.random() < 0.5 and cuts:
        row["shape"] = [loop["extent"], *row["shape"][1:]]
        row["size"] = row["rotate"] * loop["extent"] * 1024
    else:
        for op, cut in cuts:
            op["slices"].remove(cut)


def toggle_slice(document: Document, rng: random.Random) -> None:
    cuts = [(op, cut) for op in document["ops"] for cut in op["slices"]]
    if cuts:
        op, cut = rng.choice(cuts)
        op["slices"].remove(cut)


def read_more(document: Document, rng: random.Random) -> None:
    op, row = rng.choice(document["ops"]), rng.choice(document["buffers"])
    name = f"more{len(op['operands'])}"
    if op["kernel"] != "mix" or row["id"] in (*op["reads"], *op["writes"]):
        return
    op["reads"].append(row["id"])
    op["operands"][name] = row["id"]
    loop = next((loop for loop in document["regions"] if loop["name"] == op["region"]), None)
    if loop is not None and row["shape"][0] in (loop["rows"], loop["extent"]) and rng.random() < 0.7:
        op["slices"].append([name, 0, loop["name"], 1])


def write_more(document: Document, rng: random.Random) -> None:
    before = copy.deepcopy(document["ops"])
    read_more(document, rng)
    for op, old in zip(document["ops"], before, strict=True):
        for b in op["reads"][len(old["reads"]) :]:
            op["writes"].append(b)
            if rng.random() < 0.5:
                op["reads"].remove(b)


def change_count(document: Document, rng: random.Random) -> None:
    """Run a loop once, or more often, over more rows."""
    if not document["regions"]:
        return
    loop, count = rng.choice(document["regions"]), rng.choice([1, 3, 4])
    old, new = loop["extent"], loop["rows"] * count
    for row in document["buffers"]:
        sliced = any(
            cut[2] == loop["name"] and op["operands"][cut[0]] == row["id"]
            for op in document["ops"]
            for cut in op["slices"]
        )
        if sliced and row["shape"][0] == old and row["region"] != loop["name"]:
            row["shape"][0] = new
            row["size"] = new * 1024 * row["rotate"]
    loop.update(extent=new, count=count)
    document["dims"][loop["dim"]] = new


DISTURBANCES = (
    move_to_stream, move_to_stream, add_edge, add_edge, remove_edge, change_slots, change_home, toggle_slice, read_more,
    write_more, change_count,
)  # fmt: skip


def settle(document: Document, rng: random.Random) -> bool:
    """Let everything that a planner would derive follow from the ops; False where there is nothing to derive."""
    for op in document["ops"]:
        op["kernel"] = "mix"  # bytes and shapes are another matter
    settle_barriers(document)
    parts = read_document(document, [])
    plan = None if parts is None else read_skeleton(parts[0], [])
    if plan is None or not check_structure(plan):
        return False
    derive_lifetimes(plan)
    for row in document["buffers"]:
        row.update(start=plan.start[row["id"]], end=plan.end[row["id"]], gaps=[])
        if row["end"] <= row["start"]:
            return False
    roots = [row for row in document["buffers"] if row["alias_of"] is None]
    for pool in ("workspace", "host"):
        place([row for row in roots if row["pool"] == pool], rng)
    for row in document["buffers"]:
        if row["alias_of"] is not None:
            row["offset"] = document["buffers"][row["alias_of"]]["offset"] + row["alias_offset"]
    document.update(
        budget_bytes=1 << 40, host_budget_bytes=1 << 40, max_ctx_tokens=1 << 40, implementations={}, trace=[]
    )  # fmt: skip
    settle_totals(document)
    live = [
        sum(row["size"] for row in roots if row["pool"] == "workspace" and row["start"] <= t < row["end"])
        for t in range(len(document["ops"]))
    ]
    at = live.index(max(live))
    document["formula"] = [{"expr": str(live[at]), "at": document["ops"][at]["name"]}]
    return True


def settle_barriers(document: Document) -> None:
    parents = {loop["name"]: loop["parent"] for loop in document["regions"]}

    def is_within(home: str | None, name: str) -> bool:
        while home is not None and home != name:
            home = parents[home]
        return home is not None

    first: dict[int, bool] = {}
    for op in document["ops"]:
        for b in op["reads"]:
            first.setdefault(b, True)
        for b in op["writes"]:
            first.setdefault(b, False)
    for loop, barrier in zip(document["regions"], document["barriers"], strict=True):
        ops = document["ops"][loop["start"] : loop["end"]]
        reads, writes = ({b for op in ops for b in op[side]} for side in ("reads", "writes"))
        rows = [row for row in document["buffers"] if row["pool"].split("/")[0] in ("workspace", "state")]
        outside = {row["id"] for row in rows if not is_within(row["region"], loop["name"])}
        carried = {row["id"] for row in rows if row["id"] not in outside and first.get(row["id"])}
        barrier.update(
            inputs=sorted((reads & outside) - writes), outputs=sorted(writes & outside), carried=sorted(carried)
        )


def place(rows: list[Row], rng: random.Random) -> None:
    """First fit in a random order, so that addresses are shared wherever lifetimes allow."""
    placed: list[Row] = []
    for row in rng.sample(rows, len(rows)):
        row["offset"] = 0
        beside = [other for other in placed if other["start"] < row["end"] and row["start"] < other["end"]]
        for other in sorted(beside, key=lambda other: int(other["offset"])):
            if other["offset"] < row["offset"] + row["size"]:
                row["offset"] = max(row["offset"], other["offset"] + other["size"])
        placed.append(row)
