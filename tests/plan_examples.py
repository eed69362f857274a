"""Small plan documents written by hand: lifetimes, offsets and totals are typed in, not computed.

Each example is a function that returns a fresh document, so that tests may break it. A row is 256 float32 values,
1,024 bytes, and tensors are `[rows, 256]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Document = dict[str, Any]
Row = dict[str, Any]

PAGE_BYTES = 4096
KIB = 1024


def buffer(
    name: str,
    life: tuple[int, int],
    offset_kib: int,
    rows: int = 1,
    *,
    kind: str = "transient",
    pool: str = "workspace",
    region: str | None = None,
    gaps: Sequence[tuple[int, int]] = (),
    alias_of: int | None = None,
    alias_kib: int = 0,
    covers_kib: int = 0,
    rotate: int = 1,
) -> Row:
    """One buffer of `rows` KiB a slot; `covers_kib` is the size of a root that its aliases make larger."""
    return {
        "id": -1, "name": name, "kind": kind, "pool": pool, "offset": offset_kib * KIB,
        "size": max(rows * rotate, covers_kib) * KIB, "start": life[0], "end": life[1], "gaps": [list(gap) for gap in gaps],
        "alias_of": alias_of, "alias_offset": alias_kib * KIB,
        "dtype": "float32", "shape": [rows, 256], "alignment": 512, "region": region, "tensor": None, "rotate": rotate,
    }  # fmt: skip


def op(
    name: str,
    reads: Sequence[int],
    writes: Sequence[int],
    *,
    region: str | None = None,
    stream: str = "main",
    inplace: Sequence[tuple[int, int]] = (),
    slices: Sequence[tuple[int, str]] = (),
) -> Row:
    """One op whose operands are named r0, r1, … and w0, w1, …; `slices` are (buffer, region), by rows, on axis 0."""
    operands = {f"r{k}": b for k, b in enumerate(reads)} | {f"w{k}": b for k, b in enumerate(writes)}
    sliced = [[operand, 0, by, 1] for b, by in slices for operand, at in operands.items() if at == b]
    return {
        "index": -1, "name": name, "kernel": "mix", "stream": stream, "region": region,
        "reads": list(reads), "writes": list(writes), "flops": 2, "bytes": 2048, "operands": operands, "attrs": {},
        "inplace": [list(pair) for pair in inplace], "slices": sliced,
    }  # fmt: skip


def region(
    name: str, span: tuple[int, int], extent: int, rows: int, count: int, parent: str | None = None, knob: str = ""
) -> Row:
    """One chunk loop over `extent` rows of a dim that is called like its knob, which by default is called like it."""
    return {
        "name": name, "knob": knob or name, "dim": knob or name, "extent": extent, "rows": rows, "count": count,
        "start": span[0], "end": span[1], "parent": parent,
    }  # fmt: skip


def barrier(
    name: str,
    span: tuple[int, int],
    *,
    of: str | None = None,
    inputs: Sequence[int] = (),
    outputs: Sequence[int] = (),
    carried: Sequence[int] = (),
) -> Row:
    """The barrier of a region, or an explicit one."""
    lists = {"inputs": list(inputs), "outputs": list(outputs), "carried": list(carried)}
    return {"name": name, "region": of, "start": span[0], "end": span[1], **lists}


def plan(
    ops: Sequence[Row],
    buffers: Sequence[Row],
    *,
    peak_at: str,
    peak_kib: int,
    lower_bound_kib: int,
    workspace_kib: int,
    weights_kib: int = 0,
    state_kib: int = 0,
    total_kib: int,
    host_kib: int = 0,
    regions: Sequence[Row] = (),
    barriers: Sequence[Row] = (),
    edges: Sequence[tuple[str, int, int]] = (),
) -> Document:
    """Join the parts; pages are 4 KiB, context and libraries take 4 KiB each, the budgets are what is taken.

    The formula is the lower bound as a number, at the first op where so much is live.
    """
    for i, row in enumerate(ops):
        row["index"] = i
    for b, row in enumerate(buffers):
        row["id"] = b
    capacities = {"workspace": workspace_kib, "weights": weights_kib, "host": host_kib}
    states = [row for row in buffers if row["pool"].startswith("state/")]
    capacities |= {row["pool"]: -(-row["size"] // PAGE_BYTES) * PAGE_BYTES // KIB for row in states}
    devices = {"host": "cpu"}
    return {
        "schema": "mosaic.plan/1", "mosaic_version": "0.1.0", "model": "example", "phase": "example",
        "dtype": "float32", "dims": {"tokens": 5, "seqs": 1} | {row["dim"]: row["extent"] for row in regions},
        "device": "rtx-4090", "backend": "cuda", "estimated": True, "device_memory_bytes": 1 << 30,
        "page_bytes": PAGE_BYTES,
        "mesh": {"size": 1, "axes": {"tensor": 1}},
        "implementations": {},
        "pools": [
            {"name": name, "device": devices.get(name, "cuda:0"), "capacity": kib * KIB}
            for name, kib in capacities.items()
        ],
        "regions": list(regions), "barriers": list(barriers),
        "edges": [{"kind": kind, "from": start, "to": end} for kind, start, end in edges],
        "budget_bytes": total_kib * KIB, "host_bytes": host_kib * KIB, "host_budget_bytes": host_kib * KIB,
        "config": {row["knob"]: row["rows"] for row in regions}, "fits": True,
        "components": {
            "context": 4 * KIB, "library": 4 * KIB, "weights": weights_kib * KIB, "state": state_kib * KIB,
            "workspace": workspace_kib * KIB,
        },
        "total_bytes": total_kib * KIB, "peak_bytes": peak_kib * KIB, "lower_bound_bytes": lower_bound_kib * KIB,
        "optimal": peak_kib == lower_bound_kib, "max_ctx_tokens": 5, "predicted_step_ms": 0.5,
        "formula": [{"expr": str(lower_bound_kib * KIB), "at": peak_at}], "trace": [],
        "solver": "by hand", "ops": list(ops), "buffers": list(buffers),
    }  # fmt: skip


def chain() -> Document:
    """A plain chain with scratch: x -> a -> b -> y, where b reuses nothing, y reuses a's bytes."""
    return plan(
        [op("first", [0], [1]), op("second", [1], [2, 3]), op("third", [2], [4])],
        [
            buffer("x", (0, 1), 0, 2, kind="input"),
            buffer("a", (0, 2), 2, 2),
            buffer("b", (1, 3), 0, 2),
            buffer("scratch", (1, 2), 4, kind="scratch"),
            buffer("y", (2, 3), 2, 2, kind="output"),
        ],
        peak_at="second", peak_kib=5, lower_bound_kib=5, workspace_kib=8, total_kib=16,
    )  # fmt: skip


def pools() -> Document:
    """Two weights and a state beside the workspace; the state is updated in place."""
    return plan(
        [op("first", [0, 1], [2]), op("keep", [2, 3], [3]), op("second", [2, 4], [5])],
        [
            buffer("w0", (0, 3), 0, 3, kind="weight", pool="weights"),
            buffer("x", (0, 1), 0, 2, kind="input"),
            buffer("a", (0, 3), 2, 2),
            buffer("cache", (0, 3), 0, 4, kind="state", pool="state/cache"),
            buffer("w1", (0, 3), 3, 2, kind="weight", pool="weights"),
            buffer("y", (2, 3), 0, 2, kind="output"),
        ],
        peak_at="first", peak_kib=4, lower_bound_kib=4, workspace_kib=4, weights_kib=8, state_kib=4, total_kib=24,
    )  # fmt: skip


def chunked() -> Document:
    """A chunk loop of 5 rows by 2: x is read and y filled slice by slice; gate and up belong to the body."""
    sliced = "ffn"
    return plan(
        [
            op("embed", [0], [1]),
            op("gate", [1], [2], region=sliced, slices=[(1, sliced), (2, sliced)]),
            op("up", [1, 2], [3], region=sliced, slices=[(1, sliced), (2, sliced), (3, sliced)]),
            op("down", [3], [4], region=sliced, slices=[(3, sliced), (4, sliced)]),
            op("head", [4], [5]),
        ],
        [
            buffer("ids", (0, 1), 5, 5, kind="input"),
            buffer("x", (0, 4), 0, 5),
            buffer("gate", (1, 3), 10, 2, region=sliced),
            buffer("up", (2, 4), 12, 2, region=sliced),
            buffer("y", (1, 5), 5, 5),
            buffer("logits", (4, 5), 0, 5, kind="output"),
        ],
        peak_at="up", peak_kib=14, lower_bound_kib=14, workspace_kib=16, total_kib=24,
        regions=[region(sliced, (1, 4), 5, 2, 3)],
        barriers=[barrier(sliced, (1, 4), of=sliced, inputs=[1], outputs=[4])],
    )  # fmt: skip


def nested() -> Document:
    """A loop of 4 rows by 2, and inside it a loop of 3 by 1 that accumulates into a buffer of the outer body."""
    return plan(
        [
            op("embed", [0], [1]),
            op("project", [1], [2], region="outer", slices=[(1, "outer")]),
            op("clear", [], [3], region="outer"),
            op("score", [2], [4], region="inner"),
            op("accumulate", [4, 3], [3], region="inner"),
            op("store", [3], [5], region="outer", slices=[(5, "outer")]),
            op("head", [5], [6]),
        ],
        [
            buffer("ids", (0, 1), 4, 4, kind="input"),
            buffer("x", (0, 6), 0, 4),
            buffer("q", (1, 5), 8, 2, region="outer"),
            buffer("sum", (2, 6), 10, 2, region="outer"),
            buffer("s", (3, 5), 12, 1, region="inner"),
            buffer("y", (1, 7), 4, 4),
            buffer("logits", (6, 7), 0, 4, kind="output"),
        ],
        peak_at="score", peak_kib=13, lower_bound_kib=13, workspace_kib=16, total_kib=24,
        regions=[region("outer", (1, 6), 4, 2, 2), region("inner", (3, 5), 3, 1, 3, parent="outer")],
        barriers=[
            barrier("outer", (1, 6), of="outer", inputs=[1], outputs=[5]),
            barrier("inner", (3, 5), of="inner", inputs=[2], outputs=[3]),
        ],
    )  # fmt: skip


def carried() -> Document:
    """A loop that reads the maximum of the iteration before, then writes the new one, which lives throughout."""
    return plan(
        [
            op("embed", [0], [1]),
            op("score", [1], [2], region="rows", slices=[(1, "rows"), (2, "rows")]),
            op("compare", [2, 3], [4], region="rows"),
            op("keep", [4], [3, 5], region="rows"),
        ],
        [
            buffer("ids", (0, 1), 4, 4, kind="input"),
            buffer("x", (0, 4), 0, 4),
            buffer("s", (1, 3), 6, 1, region="rows"),
            buffer("maximum", (1, 4), 4, 1, region="rows"),
            buffer("larger", (2, 4), 7, 1, region="rows"),
            buffer("y", (1, 4), 5, 1, kind="output"),
        ],
        peak_at="compare", peak_kib=8, lower_bound_kib=8, workspace_kib=8, total_kib=16,
        regions=[region("rows", (1, 4), 4, 1, 4)],
        barriers=[barrier("rows", (1, 4), of="rows", inputs=[1], outputs=[5], carried=[3])],
    )  # fmt: skip


def alias_group() -> Document:
    """Two values share the storage of a third, one behind the other; the third is dead by then."""
    return plan(
        [
            op("qkv", [0], [1]),
            op("mix", [1], [2]),
            op("left", [2], [3]),
            op("right", [2], [4]),
            op("join", [3, 4], [5]),
        ],
        [
            buffer("x", (0, 1), 0, 2, kind="input"),
            buffer("root", (0, 5), 2, 3, covers_kib=4),
            buffer("m", (1, 4), 0, 2),
            buffer("left", (2, 5), 2, 2, alias_of=1),
            buffer("right", (3, 5), 4, 2, alias_of=1, alias_kib=2),
            buffer("y", (4, 5), 0, 2, kind="output"),
        ],
        peak_at="mix", peak_kib=6, lower_bound_kib=6, workspace_kib=8, total_kib=16,
    )  # fmt: skip


def inplace() -> Document:
    """The output of attention overwrites its queries, as the op says it may."""
    return plan(
        [op("q", [0], [1]), op("k", [0], [2]), op("attention", [1, 2], [3], inplace=[(3, 1)]), op("out", [3], [4])],
        [
            buffer("x", (0, 2), 0, 2, kind="input"),
            buffer("q", (0, 4), 2, 2),
            buffer("k", (1, 3), 4, 2),
            buffer("y", (2, 4), 2, 2, alias_of=1),
            buffer("z", (3, 4), 0, 2, kind="output"),
        ],
        peak_at="k", peak_kib=6, lower_bound_kib=6, workspace_kib=8, total_kib=16,
    )  # fmt: skip


def inplace_sliced() -> Document:
    """A loop overwrites a tensor of the outside slice by slice, through an op that may work in place."""
    cut = [(1, "rows"), (2, "rows")]
    return plan(
        [
            op("embed", [0], [1]),
            op("norm", [1], [2], region="rows", inplace=[(2, 1)], slices=cut),
            op("head", [2], [3]),
        ],
        [
            buffer("ids", (0, 1), 4, 4, kind="input"),
            buffer("x", (0, 3), 0, 4),
            buffer("normed", (1, 3), 0, 4, alias_of=1),
            buffer("y", (2, 3), 4, 4, kind="output"),
        ],
        peak_at="embed", peak_kib=8, lower_bound_kib=8, workspace_kib=8, total_kib=16,
        regions=[region("rows", (1, 2), 4, 1, 4)],
        barriers=[barrier("rows", (1, 2), of="rows", inputs=[1], outputs=[2])],
    )  # fmt: skip


def side_stream() -> Document:
    """A copy into a slot on a side stream, forked after op 1 and joined by op 4."""
    return plan(
        [
            op("first", [0], [1]),
            op("second", [1], [2]),
            op("prefetch", [7], [3], stream="copy"),
            op("third", [2], [4]),
            op("fourth", [4, 3], [5]),
            op("fifth", [5], [6]),
        ],
        [
            buffer("x", (0, 1), 0, 2, kind="input"),
            buffer("a", (0, 2), 2, 2),
            buffer("b", (1, 4), 0, 2),
            buffer("slot", (2, 5), 2, 3),
            buffer("c", (3, 5), 5, 2),
            buffer("d", (4, 6), 0, 2),
            buffer("y", (5, 6), 2, 2, kind="output"),
            buffer("w", (0, 6), 0, 3, kind="weight", pool="host"),
        ],
        peak_at="third", peak_kib=7, lower_bound_kib=7, workspace_kib=8, total_kib=16, host_kib=4,
        edges=[("fork", 1, 2), ("wait", 2, 4)],
    )  # fmt: skip


def two_side_streams() -> Document:
    """A slot that one side stream leaves and another takes over, ordered by the join of the one before the fork."""
    return plan(
        [
            op("first", [0], [1]),
            op("prefetch", [5], [2], stream="copy"),
            op("second", [1], [3]),
            op("join", [3, 2], [4]),
            op("select", [4], [6], stream="index"),
            op("last", [4, 6], [7]),
        ],
        [
            buffer("x", (0, 1), 0, 2, kind="input"),
            buffer("a", (0, 3), 2, 2),
            buffer("slot", (1, 4), 4, 2),
            buffer("b", (2, 4), 0, 2),
            buffer("c", (3, 6), 2, 2),
            buffer("w", (0, 6), 0, 2, kind="weight", pool="weights"),
            buffer("rows", (4, 6), 4, 2),
            buffer("y", (5, 6), 0, 2, kind="output"),
        ],
        peak_at="second", peak_kib=6, lower_bound_kib=6, workspace_kib=8, weights_kib=4, total_kib=20,
        edges=[("fork", 0, 1), ("wait", 1, 3), ("fork", 3, 4), ("wait", 4, 5)],
    )  # fmt: skip


def copy(
    name: str, source: int, target: int, rows: int, *, stream: str, cut: Sequence[tuple[int, str]] = (), **more: Any
) -> Row:
    """A `copy` of `rows` rows in all, on a side stream; `cut` are (buffer, region) as in `op`."""
    row = op(name, [source], [target], stream=stream, **more)
    operands = {"x": source, "y": target}
    slices = [[operand, 0, by, 1] for b, by in cut for operand, at in operands.items() if at == b]
    return {**row, "kernel": "copy", "operands": operands, "flops": 0, "bytes": 2 * rows * KIB, "slices": slices}


def weight_on_host(name: str, num_ops: int, offset_kib: int, rows: int) -> Row:
    """A weight of the checkpoint that stays in host memory."""
    return {**buffer(name, (0, num_ops), offset_kib, rows, kind="host", pool="host"), "tensor": f"model.{name}"}


def streamed() -> Document:
    """Three weights that arrive from host memory, each while the op before the one that needs it runs; two slots."""
    fetch = "fetch"
    return plan(
        [
            copy("w0_fetch", 5, 8, 2, stream=fetch),
            op("embed", [0], [1]),
            copy("w1_fetch", 6, 9, 2, stream=fetch),
            op("first", [1, 8], [2]),
            copy("w2_fetch", 7, 10, 2, stream=fetch),
            op("second", [2, 9], [3]),
            op("third", [3, 10], [4]),
        ],
        [
            buffer("x", (0, 2), 4, 2, kind="input"),
            buffer("a", (1, 4), 6, 2),
            buffer("b", (3, 6), 4, 2),
            buffer("c", (5, 7), 6, 2),
            buffer("y", (6, 7), 2, 2, kind="output"),
            weight_on_host("w0@host", 7, 0, 2),
            weight_on_host("w1@host", 7, 2, 2),
            weight_on_host("w2@host", 7, 4, 2),
            buffer("w0", (0, 4), 0, 2),
            buffer("w1", (2, 6), 2, 2),
            buffer("w2", (4, 7), 0, 2),
        ],
        peak_at="first", peak_kib=8, lower_bound_kib=8, workspace_kib=8, total_kib=16, host_kib=8,
        edges=[("wait", 0, 3), ("fork", 1, 2), ("wait", 2, 5), ("fork", 3, 4), ("wait", 4, 6)],
    )  # fmt: skip


def offloaded() -> Document:
    """Hidden states in host memory: one loop stores them, another fetches windows of 2 rows, updates and stores them."""
    first, second = "embed", "ffn"
    return plan(
        [
            op("embed", [0], [1], region=first, slices=[(0, first), (1, first)]),
            copy("embed_store", 1, 2, 5, stream="store", region=first, cut=[(1, first), (2, first)]),
            copy("ffn_fetch", 2, 3, 5, stream="fetch", region=second, cut=[(2, second), (3, second)]),
            op("up", [3], [4], region=second, slices=[(3, second), (4, second)]),
            op("down", [4, 3], [3], region=second, slices=[(3, second), (4, second)]),
            copy("ffn_store", 3, 2, 5, stream="store", region=second, cut=[(2, second), (3, second)]),
            op("head", [2], [5]),
        ],
        [
            buffer("ids", (0, 2), 4, 5, kind="input"),
            buffer("embedded", (0, 2), 0, 2, region=first, rotate=2),
            buffer("hidden", (0, 7), 0, 5, kind="host", pool="host"),
            buffer("window", (2, 6), 0, 2, region=second, rotate=2),
            buffer("h", (3, 5), 4, 2, region=second),
            buffer("y", (6, 7), 0, 5, kind="output"),
        ],
        peak_at="embed", peak_kib=9, lower_bound_kib=9, workspace_kib=12, total_kib=20, host_kib=8,
        regions=[region(first, (0, 2), 5, 2, 3), region(second, (2, 6), 5, 2, 3)],
        barriers=[barrier(first, (0, 2), of=first, inputs=[0]), barrier(second, (2, 6), of=second)],
        edges=[("fork", 0, 1), ("wait", 2, 3), ("fork", 4, 5)],
    )  # fmt: skip


def offloaded_groups() -> Document:
    """A loop over groups, whose weights arrive a group ahead, around one that updates hidden states in host memory.

    The inner loop's streams join main each time it ends, so that the outer one may fetch and store the same rows again.
    """
    outer, inner = "groups", "rows"
    both = [(2, inner), (3, inner)]
    return plan(
        [
            op("embed", [0], [1]),
            copy("keep", 1, 2, 4, stream="store"),
            op("wait", [0], [7]),
            copy("weights", 4, 5, 4, stream="weights", region=outer, cut=[(4, outer), (5, outer)]),
            op("keys", [7, 5], [6], region=outer, slices=[(5, outer)]),
            copy("fetch", 2, 3, 8, stream="fetch", region=inner, cut=both),
            op("mix", [6, 3], [3], region=inner, slices=[(3, inner)]),
            copy("store", 3, 2, 8, stream="store", region=inner, cut=both),
            op("head", [2, 7], [8]),
        ],
        [
            buffer("ids", (0, 3), 4, 4, kind="input"),
            buffer("x", (0, 2), 0, 4),
            buffer("hidden", (1, 9), 4, 4, kind="host", pool="host"),
            buffer("window", (5, 8), 4, 2, region=inner, rotate=2),
            weight_on_host("w@host", 9, 0, 4),
            buffer("w", (3, 8), 0, 2, region=outer, rotate=2),
            buffer("k", (4, 8), 8, 1, region=outer),
            buffer("z", (2, 9), 9, 1),
            buffer("y", (8, 9), 0, 4, kind="output"),
        ],
        peak_at="fetch", peak_kib=10, lower_bound_kib=10, workspace_kib=12, total_kib=20, host_kib=8,
        regions=[region(outer, (3, 8), 4, 2, 2), region(inner, (5, 8), 4, 2, 2, parent=outer)],
        barriers=[
            barrier(outer, (3, 8), of=outer, inputs=[7]),
            barrier(inner, (5, 8), of=inner, inputs=[6]),
        ],
        edges=[("fork", 0, 1), ("wait", 1, 2), ("wait", 3, 4), ("wait", 5, 6), ("fork", 6, 7)],
    )  # fmt: skip


def joined_in_loop() -> Document:
    """A side op that each iteration forks and joins: one slot does, and it may touch what lives outside."""
    rows = "rows"
    return plan(
        [
            op("embed", [0], [1]),
            op("score", [1], [2], region=rows, slices=[(1, rows), (2, rows)]),
            op("select", [2, 1], [3], region=rows, stream="index", slices=[(2, rows), (3, rows)]),
            op("other", [1], [4], region=rows, slices=[(1, rows), (4, rows)]),
            op("gather", [4, 3], [5], region=rows, slices=[(3, rows), (4, rows), (5, rows)]),
        ],
        [
            buffer("ids", (0, 1), 4, 4, kind="input"),
            buffer("x", (0, 5), 0, 4),
            buffer("scores", (1, 5), 8, 1, region=rows),
            buffer("chosen", (1, 5), 9, 1, region=rows),
            buffer("o", (3, 5), 10, 1, region=rows),
            buffer("y", (1, 5), 4, 4, kind="output"),
        ],
        peak_at="other", peak_kib=11, lower_bound_kib=11, workspace_kib=12, total_kib=20,
        regions=[region(rows, (1, 5), 4, 1, 4)],
        barriers=[barrier(rows, (1, 5), of=rows, inputs=[1], outputs=[5])],
        edges=[("fork", 1, 2), ("wait", 2, 4)],
    )  # fmt: skip


def explicit_barrier() -> Document:
    """A registrar keeps `a` until op 3, although nothing reads it after op 1."""
    return plan(
        [op("first", [0], [1]), op("second", [1], [2]), op("third", [2], [3]), op("fourth", [3], [4])],
        [
            buffer("x", (0, 1), 2, 2, kind="input"),
            buffer("a", (0, 3), 0, 2),
            buffer("b", (1, 3), 2, 2),
            buffer("c", (2, 4), 4, 2),
            buffer("y", (3, 4), 0, 2, kind="output"),
        ],
        peak_at="third", peak_kib=6, lower_bound_kib=6, workspace_kib=8, total_kib=16,
        barriers=[barrier("keep a", (1, 3), inputs=[1])],
    )  # fmt: skip


def gap() -> Document:
    """`a` is written twice; between its last read and its second write b and c use its bytes."""
    return plan(
        [
            op("first", [0], [1]),
            op("second", [1], [2]),
            op("third", [2], [3]),
            op("fourth", [3], [4]),
            op("fifth", [4], [1]),
            op("sixth", [1], [5]),
        ],
        [
            buffer("x", (0, 1), 2, 2, kind="input"),
            buffer("a", (0, 6), 0, 2, gaps=[(2, 4)]),
            buffer("b", (1, 3), 2, 2),
            buffer("c", (2, 4), 0, 2),
            buffer("d", (3, 5), 2, 2),
            buffer("y", (5, 6), 2, 2, kind="output"),
        ],
        peak_at="first", peak_kib=4, lower_bound_kib=4, workspace_kib=4, total_kib=12,
    )  # fmt: skip


def _row(
    name: str, dtype: str, shape: Sequence[int], size: int, life: tuple[int, int], offset: int, **more: Any
) -> Row:
    row = buffer(name, life, 0)
    return {**row, "offset": offset, "size": size, "dtype": dtype, "shape": list(shape), **more}


def _launch(
    kernel: str, name: str, reads: Row, writes: Row, flops: int, moved: int, updates: Sequence[int] = (), **more: Any
) -> Row:
    row = op(name, list(reads.values()), [*writes.values(), *updates])
    return {**row, "kernel": kernel, "operands": {**reads, **writes}, "flops": flops, "bytes": moved, **more}


def step() -> Document:
    """A whole step of one layer from shipped operators: 4 tokens, 2 heads of 128, feed-forward 512 by chunks of 2.

    A token's row is 1 KiB, a square weight 256 KiB. At `v` the hidden states, queries, keys and values are live.
    """
    heads = {"head_size": 128, "scale": 0.08838834764831845}
    cut = [["x", 0, "ffn", 1], ["y", 0, "ffn", 1]]
    square, wide = 256 * KIB, 512 * KIB
    weight = {"kind": "weight", "pool": "weights"}
    statistics = {"token": 17, "maximum": 18, "second": 19, "logsumexp": 20, "entropy": 21}
    document = plan(
        [
            _launch("embedding", "hidden", {"ids": 0, "table": 3}, {"y": 10}, 0, 8224),
            _launch("linear", "q", {"x": 10, "weight": 4}, {"y": 11}, 524288, 270336),
            _launch("linear", "k", {"x": 10, "weight": 5}, {"y": 12}, 524288, 270336),
            _launch("linear", "v", {"x": 10, "weight": 6}, {"y": 13}, 524288, 270336),
            _launch(
                "attention", "mix", {"q": 11, "k": 12, "v": 13, "cu_seqlens": 1}, {"y": 14}, 16384, 16392, attrs=heads,
                inplace=[[14, 11]],
            ),
            _launch("linear_add", "o", {"x": 14, "weight": 7, "y": 10}, {}, 524288, 274432, updates=[10]),
            _launch("linear", "up", {"x": 10, "weight": 8}, {"y": 15}, 1048576, 1060864, region="ffn", slices=cut),
            _launch(
                "linear_add", "down", {"x": 15, "weight": 9, "y": 10}, {}, 1048576, 1064960, updates=[10], region="ffn",
                slices=cut,
            ),
            _launch("gather_rows", "gathered", {"x": 10, "rows": 2}, {"y": 16}, 0, 4112),
            _launch("unembed_stats", "stats", {"x": 16, "weight": 3}, statistics, 8192, 10288),
            _launch("confidence", "score", {"maximum": 18, "logsumexp": 20}, {"y": 22}, 4, 24),
        ],
        [
            _row("ids", "int64", (4,), 512, (0, 1), 5120, kind="input"),
            _row("cu_seqlens", "int32", (2,), 512, (0, 5), 512, kind="input"),
            _row("row_ids", "int64", (2,), 512, (0, 9), 0, kind="input"),
            _row("table", "float32", (8, 256), 8 * KIB, (0, 11), 0, **weight),
            *(
                _row(f"w{name}", "float32", (256, 256), square, (0, 11), 8 * KIB + k * square, **weight)
                for k, name in enumerate("qkvo")
            ),
            _row("wup", "float32", (512, 256), wide, (0, 11), 1032 * KIB, **weight),
            _row("wdown", "float32", (256, 512), wide, (0, 11), 1544 * KIB, **weight),
            _row("x", "float32", (4, 256), 4096, (0, 9), 1024),
            _row("q", "float32", (4, 256), 4096, (1, 6), 5120),
            _row("k", "float32", (4, 256), 4096, (2, 5), 9216),
            _row("v", "float32", (4, 256), 4096, (3, 5), 13312),
            _row("mixed", "float32", (4, 256), 4096, (4, 6), 5120, alias_of=11),
            _row("h", "float32", (2, 512), 4096, (6, 8), 5120, region="ffn"),
            _row("g", "float32", (2, 256), 2048, (8, 10), 5120),
            _row("token", "int64", (2,), 512, (9, 11), 1024, kind="output"),
            *(
                _row(name, "float32", (2,), 512, (9, 11), 1536 + 512 * k, kind="output")
                for k, name in enumerate(("maximum", "second", "logsumexp", "entropy"))
            ),
            _row("confidence", "float32", (2,), 512, (10, 11), 3584, kind="output"),
        ],
        peak_at="v", peak_kib=17, lower_bound_kib=17, workspace_kib=20, weights_kib=2056, total_kib=2084,
        regions=[region("ffn", (6, 8), 4, 2, 2)],
        barriers=[barrier("ffn", (6, 8), of="ffn", outputs=[10])],
    )  # fmt: skip
    document["regions"][0]["dim"] = "tokens"
    config = {"head": "fused", "ffn": 2}
    document.update(
        phase="full_step", dims={"tokens": 4, "seqs": 1, "span": 4, "kv_heads": 2, "masked": 2}, config=config,
        implementations={"attention": "triton"},
        formula=[
            {"expr": "4096*tokens + 8*masked + 4*seqs + 4", "at": "v"},
            {"expr": "2048*ffn_rows + 1024*tokens + 8*masked", "at": "up"},
        ],
        trace=[
            {
                "config": {"head": "fused", "ffn": None}, "move": "the fastest configuration", "bottleneck": "v",
                "peak_bytes": 21 * KIB, "total_bytes": 2088 * KIB, "predicted_ms": 0.25,
            },
            {
                "config": config, "move": "ffn in chunks of 2 rows", "bottleneck": "v", "peak_bytes": 17 * KIB,
                "total_bytes": 2084 * KIB, "predicted_ms": 0.5,
            },
        ],
    )  # fmt: skip
    return document


EXAMPLES: Mapping[str, Callable[[], Document]] = {
    build.__name__: build
    for build in (
        chain, pools, chunked, nested, carried, alias_group, inplace, inplace_sliced, side_stream, two_side_streams,
        streamed, offloaded, offloaded_groups, joined_in_loop, explicit_barrier, gap, step,
    )
}  # fmt: skip


def decoder(layers: int = 32) -> Document:
    """A decoder of LLaDA-8B's proportions, for timing: 13 ops and 9 weights a layer, the feed-forward in a chunk loop.

    Offsets in KiB: residual 0, q and over it the attention's output 8, k 16, v 24, normed rows 32; the feed-forward's
    chunks of 2 rows use the same range.
    """
    ops: list[Row] = [op("embed", [0, 1], [2])]
    buffers = [
        buffer("ids", (0, 1), 8, 8, kind="input"),
        buffer("embedding", (0, -1), 0, kind="weight", pool="weights"),
        buffer("x", (0, -1), 0, 8),
    ]
    regions, barriers = [], []
    weights = 1
    for layer in range(layers):
        start, base, name = len(ops), len(buffers), f"layers.{layer}"
        w = list(range(base, base + 9))
        for k in range(9):
            buffers.append(buffer(f"{name}/w{k}", (0, -1), weights + k, kind="weight", pool="weights"))
        weights += 9
        n, q, k_, v, y, m, g, u = range(base + 9, base + 17)
        ffn = f"{name}/ffn"
        chunk = [(2, ffn), (m, ffn), (g, ffn), (u, ffn)]
        rows = [
            op(f"{name}/norm", [2, w[0]], [n]),
            op(f"{name}/q", [n, w[1]], [q]),
            op(f"{name}/k", [n, w[2]], [k_]),
            op(f"{name}/v", [n, w[3]], [v]),
            op(f"{name}/rope_q", [q], [q]),
            op(f"{name}/rope_k", [k_], [k_]),
            op(f"{name}/attention", [q, k_, v], [y], inplace=[(y, q)]),
            op(f"{name}/out", [y, w[4], 2], [2]),
        ]
        body = [
            ("norm", [2, w[5]], [m]), ("gate", [m, w[6]], [g]), ("up", [m, w[7]], [u]), ("silu", [g, u], [g]),
            ("down", [g, w[8], 2], [2]),
        ]  # fmt: skip
        for label, reads, writes in body:
            touched = {*reads, *writes}
            rows.append(
                op(f"{ffn}/{label}", reads, writes, region=ffn, slices=[cut for cut in chunk if cut[0] in touched])
            )
        s = start
        buffers += [
            buffer(f"{name}/n", (s, s + 4), 32, 8), buffer(f"{name}/q", (s + 1, s + 8), 8, 8),
            buffer(f"{name}/k", (s + 2, s + 7), 16, 8), buffer(f"{name}/v", (s + 3, s + 7), 24, 8),
            buffer(f"{name}/y", (s + 6, s + 8), 8, 8, alias_of=q),
            buffer(f"{ffn}/m", (s + 8, s + 11), 8, 2, region=ffn),
            buffer(f"{ffn}/g", (s + 9, s + 13), 10, 2, region=ffn),
            buffer(f"{ffn}/u", (s + 10, s + 12), 12, 2, region=ffn),
        ]  # fmt: skip
        ops += rows
        regions.append(region(ffn, (s + 8, s + 13), 8, 2, 4, knob="ffn"))
        barriers.append(barrier(ffn, (s + 8, s + 13), of=ffn, outputs=[2]))
    ops.append(op("head", [2], [len(buffers)]))
    buffers.append(buffer("logits", (len(ops) - 1, len(ops)), 8, 8, kind="output"))
    for row in buffers:
        row["end"] = len(ops) if row["end"] == -1 else row["end"]
    weights_kib = -(-weights // 4) * 4
    return plan(
        ops, buffers, peak_at="layers.0/v", peak_kib=40, lower_bound_kib=40, workspace_kib=40, weights_kib=weights_kib,
        total_kib=48 + weights_kib, regions=regions, barriers=barriers,
    )  # fmt: skip
