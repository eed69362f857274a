"""Random small plan documents, most of them sound but for one or two things, and random ways to corrupt a document."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

from plan_examples import barrier, buffer, op, plan, region
from plan_oracle import ANYWHERE, ITEM_BYTES, Document, Oracle, Row

KINDS = (
    "transient",
    "transient",
    "transient",
    "output",
    "input",
    "carry",
    "scratch",
    "host",
    "weight",
    "state",
    "external",
)
USUAL_POOL = {"host": "host", "weight": "weights", "external": "external"}
DTYPES = ("float32",) * 4 + tuple(ITEM_BYTES)
Path = tuple[str | int, ...]


def random_plan(rng: random.Random) -> Document:
    """A plan of up to seven ops and buffers whose claims are true, but for what its random accesses and places break."""
    num_ops = rng.randint(1, 7)
    regions = [*_regions(rng, 0, num_ops, None, 3)] if rng.random() < 0.6 else []
    side = rng.random() < 0.4
    ops = []
    for i in range(num_ops):
        around = [row for row in regions if row["start"] <= i < row["end"]]
        innermost = max(around, key=lambda row: row["name"].count("."), default={"name": None})
        stream = rng.choice(("main", "copy", "index")) if side else "main"
        ops.append(op(f"o{i}", [], [], region=innermost["name"], stream=stream))
    buffers = [_buffer(rng, b, regions) for b in range(rng.randint(2, 7))]
    for b, row in enumerate(buffers):
        _touch(rng, b, row, ops, regions)
    for row in ops:
        _shape_op(rng, row, buffers, regions)
    document = plan(
        ops, buffers, peak_at="o0", peak_kib=0, lower_bound_kib=0, workspace_kib=0, total_kib=0, regions=regions,
        edges=_edges(rng, ops), barriers=_explicit(rng, num_ops, len(buffers)),
    )  # fmt: skip
    document["phase"], document["backend"] = "example", rng.choice(("cuda", "cpu"))
    _alias(rng, buffers)
    settle(document, rng)
    return document


def settle(document: Document, rng: random.Random) -> None:
    """Make claims true: lifetimes, barriers, sizes, addresses, totals."""
    buffers = document["buffers"]
    found = Oracle(document)
    for row in document["regions"]:
        lists = {key: sorted(ids) for key, ids in found.crossing(row["name"]).items()}
        document["barriers"].append(barrier(row["name"], (row["start"], row["end"]), of=row["name"], **lists))
    for row, (start, end) in zip(buffers, Oracle(document).life, strict=True):
        row.update(start=start, end=end)
    for row in sorted(buffers, key=lambda row: row["alias_of"] is None):  # aliases first
        row["size"] = found.size(row["id"])
    _place(rng, buffers)
    settle_claims(document, rng)


def _place(rng: random.Random, buffers: list[Row]) -> None:
    """Stack the roots of each pool; now and then let them share bytes."""
    tops: dict[str, int] = {}
    packed = rng.random() < 0.7
    for row in buffers:
        if row["alias_of"] is None:
            at = tops.get(row["pool"], 0) if packed else 512 * rng.randint(0, 6)
            unit = row["alignment"]
            row["offset"] = -(-at // unit) * unit
            tops[row["pool"]] = row["offset"] + row["size"]
    for row in buffers:
        if row["alias_of"] is not None:
            row["offset"] = buffers[row["alias_of"]]["offset"] + row["alias_offset"]


def settle_claims(document: Document, rng: random.Random) -> None:
    """Make totals and capacities true."""
    found = Oracle(document)
    components = document["components"]
    listed = [pool for pool in document["pools"] if not pool["name"].startswith(("state/", "carry/"))]
    states = sorted({row["pool"] for row in document["buffers"] if row["pool"].startswith(("state/", "carry/"))})
    document["pools"] = [*listed, *({"name": name, "device": "", "capacity": 0} for name in states)]
    components["state"] = found.pages("state")
    for pool in document["pools"]:
        name = pool["name"]
        pool["capacity"] = found.pages(name)
        pool["device"] = "cpu" if name == "host" or document["backend"] == "cpu" else "cuda:0"
        if name in ("workspace", "weights"):
            components[name] = pool["capacity"]
    total, host = sum(components.values()), found.pages("host")
    peak, bound = found.reach("workspace"), max(found.live_bytes(), default=0)
    document.update(
        total_bytes=total, host_bytes=host, peak_bytes=peak, lower_bound_bytes=bound, optimal=peak == bound,
        budget_bytes=total - rng.choice((0, 0, 1)), host_budget_bytes=host + rng.choice((0, 0, 512)),
    )  # fmt: skip
    document["fits"] = total <= document["budget_bytes"] and host <= document["host_budget_bytes"]


def _regions(rng: random.Random, start: int, end: int, parent: str | None, left: int) -> Iterator[Row]:
    at = start
    while at < end and left:
        first = rng.randint(at, end - 1)
        last = rng.randint(first + 1, end)
        name = f"{parent or 'loop'}.{at}"
        extent, rows = rng.randint(1, 6), rng.randint(1, 4)
        yield region(name, (first, last), extent, rows, -(-extent // rows), parent)
        if rng.random() < 0.5:
            yield from _regions(rng, first, last, name, left - 1)
        at, left = last, left - 1


def _buffer(rng: random.Random, b: int, regions: list[Row]) -> Row:
    kind = rng.choice(KINDS)
    usual = (
        f"{kind}/b{b}"
        if kind == "state" or (kind == "carry" and rng.random() < 0.5)
        else USUAL_POOL.get(kind, "workspace")
    )
    anywhere = (*ANYWHERE, "weights", f"state/b{rng.randrange(12)}", f"carry/b{rng.randrange(12)}")
    pool = usual if rng.random() < 0.9 else rng.choice(anywhere)
    home = rng.choice(regions)["name"] if regions and kind in ("transient", "scratch") and rng.random() < 0.6 else None
    row = buffer(f"b{b}", (0, 0), 0, kind=kind, pool=pool, region=home)
    row.update(
        dtype=rng.choice(DTYPES), shape=[rng.randint(0, 9) if rng.random() < 0.2 else rng.randint(1, 300)],
        alignment=rng.choice((512, 512, 512, 1024)) if rng.random() < 0.95 else rng.choice((256, 768)),
        rotate=2 if home and rng.random() < 0.4 else 1,
        tensor=f"model.b{b}" if kind in ("weight", "host") and rng.random() < 0.7 else None,
    )  # fmt: skip
    if rng.random() < 0.5:
        row["shape"].append(rng.randint(1, 40))
    return row


def _touch(rng: random.Random, b: int, row: Row, ops: list[Row], regions: list[Row]) -> None:
    """Let some ops touch a buffer: most often first writing it, and most often at home."""
    home = next((span for span in regions if span["name"] == row["region"]), {"start": 0, "end": len(ops)})
    span = range(home["start"], home["end"]) if rng.random() < 0.95 else range(len(ops))
    touched = sorted(rng.sample(span, min(len(span), rng.choice((1, 2, 2, 3, 4)) if rng.random() < 0.95 else 0)))
    constant = row["kind"] == "weight" or row["tensor"] is not None
    for k, i in enumerate(touched):
        sides = ("reads",) if constant else ("reads", "writes", "both")
        side = rng.choice(sides) if k or constant or rng.random() < 0.1 else "writes"
        for key in ("reads", "writes") if side == "both" else (side,):
            ops[i][key].append(b)
    between = [(i + 1, j) for i, j in pairwise([-1, *touched, len(ops)]) if i + 1 < j]
    if between and row["pool"] == "workspace" and rng.random() < 0.3:
        row["gaps"] = [[*gap] for gap in between if rng.random() < 0.7]
        if rng.random() < 0.3:
            row["gaps"].append([rng.randint(0, len(ops)), rng.randint(0, len(ops))])


def _shape_op(rng: random.Random, row: Row, buffers: list[Row], regions: list[Row]) -> None:
    """Operands, a kernel whose operands are known where they suit, in-place pairs and slices."""
    reads, writes = row["reads"], row["writes"]
    row["operands"] = {f"r{k}": b for k, b in enumerate(reads)} | {f"w{k}": b for k, b in enumerate(writes)}
    if (len(reads), len(writes)) == (1, 1) and rng.random() < 0.5:
        row.update(kernel="copy", operands={"x": reads[0], "y": writes[0]})
    if (len(reads), len(writes)) == (2, 1) and rng.random() < 0.5:
        row.update(kernel="rms_norm", operands={"x": reads[0], "weight": reads[1], "y": writes[0]})
    for old in reads:
        if writes and rng.random() < 0.3:
            row["inplace"].append([rng.choice(writes), old])
    name = row["region"]
    while name is not None:
        loop = next(span for span in regions if span["name"] == name)
        for operand, b in row["operands"].items():
            shape, axis = buffers[b]["shape"], rng.randint(0, 1)
            if rng.random() < 0.3 and axis < len(shape):
                factor, home = rng.randint(1, 2), buffers[b]["region"]
                inside = home is not None and f"{home}.".startswith(f"{name}.")
                shape[axis] = factor * (min(loop["rows"], loop["extent"]) if inside else loop["extent"])
                row["slices"].append([operand, axis, name, factor])
        name = loop["parent"]


def _alias(rng: random.Random, buffers: list[Row]) -> None:
    for row in buffers if rng.random() < 0.5 else ():
        roots = [
            other for other in buffers
            if other["alias_of"] is None and other["pool"] == row["pool"] and other is not row and other["rotate"] == 1
        ]  # fmt: skip
        is_root = any(other["alias_of"] == row["id"] for other in buffers)
        if roots and not is_root and row["rotate"] == 1 and rng.random() < 0.4:
            row.update(alias_of=rng.choice(roots)["id"], alias_offset=512 * rng.choice((0, 0, 1, 2)))


def _edges(rng: random.Random, ops: list[Row]) -> list[tuple[str, int, int]]:
    edges = []
    for i, row in enumerate(ops):
        if row["stream"] != "main":
            before = [a for a in range(i) if ops[a]["stream"] == "main"]
            after = [a for a in range(i + 1, len(ops)) if ops[a]["stream"] == "main"]
            edges += [("fork", rng.choice(before), i)] if before and rng.random() < 0.7 else []
            edges += [("wait", i, rng.choice(after))] if after and rng.random() < 0.7 else []
    return edges


def _explicit(rng: random.Random, num_ops: int, num_buffers: int) -> list[Row]:
    if rng.random() < 0.7:
        return []
    start = rng.randrange(num_ops)
    held = rng.sample(range(num_buffers), rng.randint(1, 2))
    return [barrier("held", (start, rng.randint(start + 1, num_ops)), inputs=held)]


def random_alias_group(rng: random.Random) -> Document:
    """A plan of which all but one or two buffers share one storage, most of them as a whole."""
    num_ops = rng.randint(1, 6)
    regions = [*_regions(rng, 0, num_ops, None, rng.choice((0, 1, 1, 2)))]
    ops = []
    for i in range(num_ops):
        around = [row["name"] for row in regions if row["start"] <= i < row["end"]]
        side = rng.random() < 0.05
        ops.append(op(f"o{i}", [], [], region=max(around, key=len, default=None), stream="copy" if side else "main"))
    buffers = []
    for b in range(rng.randint(2, 5)):
        home = rng.choice(regions)["name"] if regions and rng.random() < 0.3 else None
        kind = rng.choice(("transient", "transient", "output", "input", "carry")) if home is None else "transient"
        row = buffer(f"b{b}", (0, 0), 0, kind=kind, region=home)
        row["shape"] = [4, 128] if rng.random() < 0.9 else rng.choice(([2, 256], [2, 128], [512], [4, 64]))
        row["dtype"] = rng.choice(("float32",) * 12 + ("int32", "uint8"))
        if b != 1 and rng.random() < 0.8:
            row.update(alias_of=1, alias_offset=512 * rng.choice((0,) * 9 + (1, 2, 4)))
        buffers.append(row)
        _touch(rng, b, row, ops, regions)
        row["gaps"] = []
    for row in ops:
        reads, writes = row["reads"], row["writes"]
        row["operands"] = {f"r{k}": b for k, b in enumerate(reads)} | {f"w{k}": b for k, b in enumerate(writes)}
        row["inplace"] = [[new, old] for new in writes for old in reads if rng.random() < 0.5]
        around = [loop for loop in regions if loop["start"] <= ops.index(row) < loop["end"]]
        cut = rng.choice((0.0, 0.6, 0.8, 1.0))
        for operand, (axis, loop) in product(row["operands"], enumerate(around)):
            if rng.random() < cut:
                row["slices"].append([operand, min(axis, 1), loop["name"], 1])
    document = plan(
        ops, buffers, peak_at="o0", peak_kib=0, lower_bound_kib=0, workspace_kib=0, total_kib=0, regions=regions,
        edges=_edges(rng, ops), barriers=_explicit(rng, num_ops, len(buffers)),
    )  # fmt: skip
    settle(document, rng)
    return document


# Corruption.

NUMBERS = (-1024, -512, -8, -1, 1, 1, 2, 512, 1024)
ROWS = ("regions", "barriers", "edges", "pools") * 4
OTHERS: tuple[Any, ...] = ({}, [], None, True, 1.5, float("nan"), "x", 1 << 70, [[0, 1]], [None], {"x": None})


def spots(at: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every place of a document, with what is there."""
    for key, value in at.items() if isinstance(at, dict) else enumerate(at) if isinstance(at, list) else ():
        yield (*path, key), value
        yield from spots(value, (*path, key))


def put(document: Document, path: Path, value: Any) -> None:
    """Replace what is at a place."""
    at: Any = document
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value


def _pick(document: Document, rng: random.Random) -> tuple[Path, Any, list[tuple[Path, Any]]]:
    """A place, what is there, and all places of the list or field of the document that it is in."""
    keys = [key for key in document if key not in ("schema", "formula", "trace") and document[key] not in ([], {})]
    key = rng.choice([*keys, *(key for key in ROWS if document[key]), *["buffers"] * 12, *["ops"] * 8])
    everywhere = [*spots(document[key], (key,))] or [((key,), document[key])]
    field = rng.choice(sorted({str(path[2:3]) for path, _ in everywhere}))
    path, value = rng.choice([(path, value) for path, value in everywhere if str(path[2:3]) == field])
    return path, value, everywhere


def malform(document: Document, rng: random.Random) -> None:
    """Replace what is at one place by anything."""
    put(document, _pick(document, rng)[0], copy.deepcopy(rng.choice(OTHERS)))


def break_somewhere(document: Document, rng: random.Random) -> None:
    """Change one place: a number by a little, a name into one of a like place, a list by an entry."""
    path, value, everywhere = _pick(document, rng)
    if type(value) is bool:
        put(document, path, not value)
    elif type(value) is int:
        put(document, path, max(0, value + rng.choice(NUMBERS[3:6] if path[-1] != "offset" else NUMBERS)))
    elif isinstance(value, list):
        changed = list(value)
        if changed and rng.random() < 0.6:
            del changed[rng.randrange(len(changed))]
        elif changed:
            changed.append(rng.choice(changed))
        elif path[-1] in ("inputs", "outputs", "carried", "reads", "writes"):
            changed.append(rng.randrange(len(document["buffers"])))
        put(document, path, changed)
    elif value is None or isinstance(value, str):
        alike = [other for where, other in everywhere if where[-1] == path[-1] and len(where) == len(path)]
        put(document, path, rng.choice([other for other in alike if other != value] or [value]))


def break_statement(document: Document, rng: random.Random) -> None:
    """Change one thing that memory does not depend on."""
    change = rng.choice((_dims, _config, _formula, _formula, _trace, _trace, _header, _header, _launch, _weights))
    change(document, rng)


def _vary(values: dict[str, Any], rng: random.Random, others: tuple[Any, ...]) -> None:
    """Change, drop or add an entry."""
    key = rng.choice([*values, "extra"])
    if rng.random() < 0.2 and key in values:
        del values[key]
    elif type(values.get(key)) is int and rng.random() < 0.7:
        values[key] = max(1, values[key] + rng.choice((-1, 1)))
    else:
        values[key] = rng.choice(others)


def _dims(document: Document, rng: random.Random) -> None:
    _vary(document["dims"], rng, (1, 2, 3, 4))
    lengths = [row for row in document["buffers"] if row["kind"] in ("input", "state") and row["shape"]]
    if rng.random() < 0.5 and lengths:
        seqs = document["dims"].get("seqs", 1)
        rng.choice(lengths)["shape"][0] = rng.choice((seqs + 1, *document["dims"].values()))


def _config(document: Document, rng: random.Random) -> None:
    _vary(document["config"], rng, (1, 2, 3, None, "fused", "other"))


def _formula(document: Document, rng: random.Random) -> None:
    line = rng.choice(document["formula"])
    terms = line["expr"].split(" + ")
    at = rng.randrange(len(terms))
    number, *factors = terms[at].split("*")
    moved = int(number) + rng.choice((-4096, -1024, -1, 1, 1024)) if number.lstrip("-").isdecimal() else 1
    names = [*document["dims"], *(f"{row['knob']}_rows" for row in document["regions"]), "nobody", ""]
    terms[at] = rng.choice((
        "*".join((str(moved), *factors)), "*".join((number, *factors, rng.choice(names))),
        f"{number}*{rng.choice(names)}**{rng.randint(0, 10)}", "0" * rng.choice((39, 40)) + "1", f"{number}^2", "*".join(factors),
    ))  # fmt: skip
    glue = " + " if rng.random() < 0.9 else "+"
    line["expr"] = glue.join(terms)
    if rng.random() < 0.3:
        line["at"] = rng.choice((*(op["name"] for op in document["ops"]), "nowhere"))
    if rng.random() < 0.2:
        document["formula"].append({**line, "expr": str(moved)})


def _trace(document: Document, rng: random.Random) -> None:
    bound, page = document["lower_bound_bytes"], document["page_bytes"]
    peak = bound + rng.choice((0, 0, 1, page))
    fixed = document["total_bytes"] - document["components"]["workspace"]
    step = {
        "config": dict(document["config"]), "move": "", "bottleneck": rng.choice((*(op["name"] for op in document["ops"]), "no")),
        "peak_bytes": peak, "total_bytes": fixed + -(-peak // page) * page + rng.choice((0, 0, 0, page)),
        "predicted_ms": document["predicted_step_ms"] + rng.choice((0, 0, 0, 1)),
    }  # fmt: skip
    if rng.random() < 0.6 and step["config"]:
        key = rng.choice([*step["config"]])
        step["config"][key] = rng.choice((1, 2, "fused", "other", None))
    if rng.random() < 0.1:
        step["config"]["extra"] = None
    document["trace"].append(step)


def _header(document: Document, rng: random.Random) -> None:
    components, dims = document["components"], document["dims"]
    fixed = components["context"] + components["library"]
    backend = rng.choice(("cuda", "cpu"))
    document.update(rng.choice((
        {"device_memory_bytes": fixed + rng.choice((-1, 0, 1))},
        {"max_ctx_tokens": max(0, dims.get("tokens", 1) + rng.choice((-1, 0, 1)))},
        {"fits": False, "max_ctx_tokens": 0},
        {"mesh": {"size": rng.randint(1, 4), "axes": {"tensor": rng.randint(1, 2), "data": rng.randint(1, 2)}}},
        {"implementations": rng.choice(({}, {"attention": "triton"}, {"attention": "cudnn"}, {"linear": "triton"}))},
        {"implementations": {"attention": "cudnn"}, "phase": "example"},
        {"phase": rng.choice(("full_step", "example"))}, {"backend": backend}, {"dtype": rng.choice(DTYPES)},
    )))  # fmt: skip


def _launch(document: Document, rng: random.Random) -> None:
    """An attribute, a dtype or an operand of some op; most often of attention, if there is one."""
    ops = [op for op in document["ops"] if op["kernel"] == "attention"] or document["ops"]
    row = rng.choice(ops if rng.random() < 0.7 else document["ops"])
    document["implementations"] = rng.choice((document["implementations"], {"attention": "cudnn"}))
    sixteen = rng.choice(("float16", "bfloat16"))
    for b in row["operands"].values():
        if document["buffers"][b]["dtype"] == "float32" and rng.random() < 0.9:
            document["buffers"][b]["dtype"] = sixteen
    if rng.random() < 0.6:
        row["attrs"][rng.choice(("block", "head_size", "head_size"))] = rng.choice((0, 4, 8, 12, 120, 128, 136, 0.5))
    if rng.random() < 0.2 and row["operands"]:
        del row["operands"][rng.choice([*row["operands"]])]


def _weights(document: Document, rng: random.Random) -> None:
    for row in document["buffers"]:
        if rng.random() < 0.4:
            row["tensor"] = rng.choice((None, f"model.{row['name']}"))
            row["dtype"] = rng.choice(("float32", "bfloat16"))
