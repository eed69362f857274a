"""The checker's expected verdict on a plan's memory, derived naively: one buffer, one op, one pair at a time.

Written from the rules in the docstring of `mosaic.planner.check`, with no thought for speed. Well-formed documents only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, NamedTuple

Document = dict[str, Any]
Row = dict[str, Any]
Span = tuple[int, int]

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "float32": 4, "int64": 8, "float64": 8,
}  # fmt: skip
BORN = ("input", "weight", "state", "external")  # with a value
KEPT = ("output", "weight", "state", "external")  # beyond the last op
ANYWHERE = ("workspace", "host", "external")  # where an input, output, carry, transient or scratch may be
POOLS_OF = {
    "weight": ("weights", "host", "external"), "state": ("host", "external"), "host": ("host",),
    "external": ("external",),
}  # fmt: skip
POOLS = ("workspace", "weights", "host")  # and one for each state and carry, of its name
KERNELS = {  # kernel -> what it reads, what it writes, (written, read) in place
    "copy": (("x",), ("y",), ()),
    "rms_norm": (("x", "weight"), ("y",), (("y", "x"),)),
    "silu_mul": (("gate", "up"), ("gate",), ()),
}


class Reason(NamedTuple):
    """One violation, as a tuple that sorts."""

    code: str
    message: str
    buffers: tuple[int, ...] = ()
    ops: tuple[int, ...] = ()


def row_is_root(row: Row) -> bool:
    """Whether a buffer has storage of its own."""
    return row["alias_of"] is None


class Oracle:
    """A document and what is derived of it; `reasons` are the violations of memory but for stale reads."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.ops: list[Row] = document["ops"]
        self.buffers: list[Row] = document["buffers"]
        self.regions: dict[str, Row] = {row["name"]: row for row in document["regions"]}
        self.barriers: list[Row] = document["barriers"]
        self.end = len(self.ops)
        self.ids = range(len(self.buffers))

    def reasons(self) -> list[Reason]:
        """In no order; nothing but structure where the rest could not rely on it."""
        tree = [*self._tree()]
        if tree:
            return tree
        unsound = [*self._places(), *self._homes(), *self._barrier_bounds()]
        if unsound:
            return unsound
        skeleton = [
            *self._operands(), *self._edges(), *self._constants(), *self._cut_names(), *self._values(), *self._claims(),
            *self._explicit(), *self._region_barriers(), *self._never_joined(), *self._pools(), *self._groups(),
            *self._gaps(),
        ]  # fmt: skip
        loops = [*self._loops()]
        if loops:
            return skeleton + loops
        return [
            *skeleton, *self._sizes(), *self._cuts(), *self._bounds(), *self._unwritten(), *self._aliases(),
            *self._overlaps(), *self._totals(), *self._capacities(), *self._races(), *self._meetings(),
        ]  # fmt: skip

    def statements(self) -> list[Reason]:
        """The claims of a safe plan beyond memory, except its launches."""
        return [
            *self._config(), *self._dtype(), *self._dims(), *self._implementations(), *self._profile(), *self._formula(),
            *self._trace(),
        ]  # fmt: skip

    def label_of(self, b: int) -> str:
        """A buffer's name in messages."""
        return f"buffer {b} '{self.buffers[b]['name']}'"

    def label(self, i: int) -> str:
        """An op's name in messages."""
        return f"op {i} '{self.ops[i]['name']}'"

    # Structure.

    def around(self, home: str | None) -> list[str]:
        """A region and those around it."""
        names: list[str] = []
        while home is not None and home in self.regions and home not in names:
            names.append(home)
            home = self.regions[home]["parent"]
        return names

    def _tree(self) -> Iterator[Reason]:
        for name, row in self.regions.items():
            start, end, parent = row["start"], row["end"], row["parent"]
            if start >= end or end > self.end:
                yield Reason("region", f"region '{name}' covers no op: [{start}, {end}) of {self.end}")
            if parent is not None:
                around = self.regions.get(parent)
                if around is None or start >= end or start < around["start"] or end > around["end"]:
                    yield Reason("region", f"region '{name}' does not lie inside its parent {parent!r}")
                if self.regions.get(self.around(name)[-1], row)["parent"] in self.regions:
                    yield Reason("region", f"region '{name}': its parents never end")
            siblings = [other for other in self.regions.values() if other["parent"] == parent]
            siblings.sort(key=lambda other: other["start"])
            at = siblings.index(row)
            if at and start < siblings[at - 1]["end"]:
                left = siblings[at - 1]["name"]
                text = f"regions '{left}' and '{name}' overlap and neither is the other's parent"
                yield Reason("region", text)

    def _places(self) -> Iterator[Reason]:
        for i, op in enumerate(self.ops):
            names = [name for name, row in self.regions.items() if row["start"] <= i < row["end"]]
            innermost = max(names, key=lambda name: len(self.around(name)), default=None)
            if op["region"] != innermost:
                text = f"{self.label(i)} claims region {op['region']!r}, the intervals say {innermost!r}"
                yield Reason("region", text, (), (i,))

    def _homes(self) -> Iterator[Reason]:
        for home in {row["region"] for row in self.buffers} - {None, *self.regions}:
            owners = tuple(b for b in self.ids if self.buffers[b]["region"] == home)
            yield Reason("region", f"{self.label_of(owners[0])} has its home in unknown region {home!r}", owners)

    def _barrier_bounds(self) -> Iterator[Reason]:
        for row in self.barriers:
            start, end = row["start"], row["end"]
            if not start < end <= self.end:
                yield Reason("barrier-mismatch", f"barrier '{row['name']}' covers no op: [{start}, {end})")

    def _loops(self) -> Iterator[Reason]:
        for name, row in self.regions.items():
            extent, rows, count = row["extent"], row["rows"], row["count"]
            covers = extent >= 1 and rows >= 1 and (count - 1) * rows < extent <= count * rows
            if not covers:
                text = f"region '{name}': {count} chunks of {rows} rows do not cover {extent} exactly"
                yield Reason("region", text)

    # Ops.

    def _operands(self) -> Iterator[Reason]:
        for i, op in enumerate(self.ops):
            operands, reads, writes = op["operands"], set(op["reads"]), set(op["writes"])
            known = KERNELS.get(op["kernel"])
            if known is None or not operands.keys() <= {*known[0], *known[1], "scratch"}:
                sides = [("touches", [*op["reads"], *op["writes"]], reads | writes, set(operands.values()))]
            else:
                read = {operands[name] for name in known[0] if name in operands}
                written = {operands[name] for name in (*known[1], "scratch") if name in operands}
                sides = [("reads", op["reads"], reads, read), ("writes", op["writes"], writes, written)]
            for side, listed, touched, named in sides:
                if touched != named:
                    values = sorted(self._named(op, side))
                    text = f"{self.label(i)} {side} {sorted(listed)}, its operands are {values}"
                    yield Reason("operands", text, tuple(sorted(touched ^ named)), (i,))
            for new, old in op["inplace"]:
                if new == old or new not in writes or old not in reads:
                    text = f"{self.label(i)} in place: {new} is not written or {old} not read"
                    yield Reason("operands", text, (new, old), (i,))
                elif known is not None and (new, old) not in {(operands.get(a), operands.get(b)) for a, b in known[2]}:
                    text = f"{self.label(i)}: {op['kernel']} does not write {self.label_of(new)} over {self.label_of(old)} in place"
                    yield Reason("operands", text, (new, old), (i,))

    def _named(self, op: Row, side: str) -> list[int]:
        known, operands = KERNELS.get(op["kernel"]), op["operands"]
        if known is None or side == "touches":
            return list(operands.values())
        names = known[0] if side == "reads" else (*known[1], "scratch")
        return [operands[name] for name in names if name in operands]

    def _is_edge(self, edge: Row) -> bool:
        a, b = (self.ops[edge[end]]["stream"] == "main" for end in ("from", "to"))
        forward = edge["from"] < edge["to"]
        return forward and ((edge["kind"] == "fork" and a and not b) or (edge["kind"] == "wait" and b and not a))

    def _edges(self) -> Iterator[Reason]:
        for edge in self.document["edges"]:
            if not self._is_edge(edge):
                a, b = edge["from"], edge["to"]
                from_, to = (f"{self.label(i)} on {self.ops[i]['stream']!r}" for i in (a, b))
                text = f"'{edge['kind']}' from {from_} to {to}: a fork goes on from main to a side stream, a wait back"
                yield Reason("edge", text, (), (a, b))

    def _constants(self) -> Iterator[Reason]:
        for b in self.ids:
            row = self.buffers[b]
            constant = row["kind"] == "weight" or (row["kind"] == "host" and row["tensor"] is not None)
            if constant and self._written(b):
                yield Reason("read-only", f"{self.label_of(b)} holds a tensor of the checkpoint and is written", (b,))

    # Accesses.

    def _read(self, b: int) -> list[int]:
        return self._accesses["reads"][b]

    def _written(self, b: int) -> list[int]:
        return self._accesses["writes"][b]

    @cached_property
    def _accesses(self) -> dict[str, list[list[int]]]:
        return {
            side: [[i for i, op in enumerate(self.ops) if b in op[side]] for b in self.ids]
            for side in ("reads", "writes")
        }

    def touched(self, b: int) -> list[int]:
        """The ops that touch a buffer, in order."""
        return sorted({*self._read(b), *self._written(b)})

    def is_read_first(self, b: int) -> bool:
        """Whether the first op that touches a buffer reads it."""
        touched = self.touched(b)
        return bool(touched) and touched[0] in self._read(b)

    def is_within(self, b: int, region: str) -> bool:
        """Whether a buffer is at home in a region or deeper."""
        return region in self.around(self.buffers[b]["region"])

    def _values(self) -> Iterator[Reason]:
        for b in self.ids:
            row, touched = self.buffers[b], self.touched(b)
            kind, home = row["kind"], row["region"]
            roots = {other["alias_of"] for other in self.buffers}
            lives_anyway = kind in ("input", "weight", "state", "external") or (
                kind == "host" and row["tensor"] is not None
            )
            if not touched:
                if not (lives_anyway or b in roots):
                    yield Reason("unused", f"{self.label_of(b)} is touched by no op", (b,))
                continue
            written = bool(self._written(b))
            holds = kind in (*BORN, "carry") or (kind == "host" and not written)
            carried = home is not None and written and row["rotate"] == 1
            if self.is_read_first(b) and not holds and not carried:
                text = f"{self.label_of(b)} is read by {self.label(touched[0])} before any write"
                yield Reason("read-before-write", text, (b,), (touched[0],))
            if home is not None:
                span = range(self.regions[home]["start"], self.regions[home]["end"])
                if any(i not in span for i in touched):
                    text = f"{self.label_of(b)} is touched outside its home region '{home}'"
                    yield Reason("region", text, (b,), (touched[0], touched[-1]))

    # Lifetimes.

    def windows(self, b: int) -> list[Span]:
        """Over which intervals explicit barriers and side ops hold a buffer."""
        held = [
            (row["start"], row["end"])
            for row in self.barriers
            if row["region"] is None
            for a in row["inputs"]
            if a == b
        ]
        return held + [self._side_window(i) for i in self.touched(b) if self.ops[i]["stream"] != "main"]

    def _side_window(self, i: int) -> Span:
        op = self.ops[i]
        if op["region"] is not None:
            return self.regions[op["region"]]["start"], self.regions[op["region"]]["end"]
        lane = [j for j, other in enumerate(self.ops) if other["stream"] == op["stream"]]
        edges = [edge for edge in self.document["edges"] if self._is_edge(edge)]
        forks = [e["from"] for e in edges if e["kind"] == "fork" and e["to"] in lane and e["to"] <= i]
        waits = [e["to"] for e in edges if e["kind"] == "wait" and e["from"] in lane and e["from"] >= i]
        return max(forks, default=-1) + 1, min(waits, default=self.end)

    def _never_joined(self) -> Iterator[Reason]:
        for i, op in enumerate(self.ops):
            if op["stream"] != "main" and op["region"] is None and self._side_window(i)[1] == self.end:
                loose = [b for b in self.ids if i in self.touched(b) and self.buffers[b]["pool"] == "workspace"]
                if loose:
                    what = ", ".join(map(self.label_of, loose))
                    text = f"{self.label(i)} is never joined and touches the workspace: {what}"
                    yield Reason("stream-race", text, tuple(loose), (i,))

    def own_life(self, b: int) -> Span:
        """The lifetime of a buffer's own value: the hull of all that asks for it."""
        row, touched = self.buffers[b], self.touched(b)
        kind, end = row["kind"], self.end
        spans = [(i, i + 1) for i in touched] + self.windows(b)
        if kind in BORN or (kind == "carry" and self.is_read_first(b)):
            spans.append((0, 0))
        if (kind in KEPT and (touched or kind in BORN)) or (kind == "carry" and self._written(b)):
            spans.append((end, end))
        if kind == "host" and (row["tensor"] is not None if not touched else not self._written(b)):
            spans += [(0, 0), (end, end)]
        if not touched and kind == "input":
            spans.append((0, 1))
        if not touched and b not in {other["alias_of"] for other in self.buffers}:
            spans.append((0, 0))
        for name, region in self.regions.items():
            first, last = region["start"], region["end"]
            written, read = ([i for i in ops if first <= i < last] for ops in (self._written(b), self._read(b)))
            if self.is_within(b, name):
                spans += [(first, last)] if self.is_read_first(b) else []
            elif written:
                spans.append((first, last))
            elif read and kind != "weight":
                spans.append((last, last))
        return min((start for start, _ in spans), default=end), max((stop for _, stop in spans), default=0)

    def is_kept(self, b: int) -> bool:
        """Whether a value is handed on after the last op."""
        kind = self.buffers[b]["kind"]
        return kind in KEPT or (kind == "carry" and self.own_life(b)[1] == self.end)

    @cached_property
    def life(self) -> list[Span]:
        """Lifetimes; a root's covers its aliases'."""
        found = [self.own_life(b) for b in self.ids]
        for b, row in enumerate(self.buffers):
            root = row["alias_of"]
            if root is not None:
                found[root] = min(found[root][0], found[b][0]), max(found[root][1], found[b][1])
        return found

    def _claims(self) -> Iterator[Reason]:
        for b, (first, last) in enumerate(self.life):
            start, end = self.buffers[b]["start"], self.buffers[b]["end"]
            claim = f"{self.label_of(b)} claims [{start}, {end})"
            text = f"{claim}, the ops, regions, barriers and streams give [{first}, {last})"
            if start > first or end < last:
                yield Reason("lifetime-short", text, (b,))
            if start < first or end > last:
                yield Reason("lifetime-long", text, (b,))

    def _explicit(self) -> Iterator[Reason]:
        for row in self.barriers:
            if row["region"] is None and (row["outputs"] or row["carried"]):
                text = f"barrier '{row['name']}' is explicit and lists outputs or carried buffers"
                yield Reason("barrier-mismatch", text)

    def crossing(self, name: str) -> dict[str, set[int]]:
        """The buffers that cross a region's border, by the lists of its barrier."""
        region = self.regions[name]
        first, last = region["start"], region["end"]
        listed = {b for b in self.ids if self.buffers[b]["pool"].split("/")[0] in ("workspace", "state", "carry")}
        outside = {b for b in self.ids if not self.is_within(b, name)}
        written = {b for b in self.ids if any(first <= i < last for i in self._written(b))}
        read = {b for b in self.ids if any(first <= i < last for i in self._read(b))}
        weights = {b for b in self.ids if self.buffers[b]["kind"] == "weight"}
        carried = {b for b in self.ids if self.is_within(b, name) and self.is_read_first(b)}
        return {
            "inputs": listed & outside & read - written - weights, "outputs": listed & outside & written,
            "carried": listed & carried,
        }  # fmt: skip

    def _region_barriers(self) -> Iterator[Reason]:
        seen = set()
        for row in self.barriers:
            name, label = row["region"], row["name"]
            if name is None:
                continue
            if name in seen or name not in self.regions:
                yield Reason("barrier-mismatch", f"barrier '{label}' is of no region or a second one: '{name}'")
                continue
            seen.add(name)
            region = self.regions[name]
            claimed, derived = (row["start"], row["end"]), (region["start"], region["end"])
            if claimed != derived:
                text = f"covers [{claimed[0]}, {claimed[1]}), its region [{derived[0]}, {derived[1]})"
                yield Reason("barrier-mismatch", f"barrier '{label}' {text}")
            for key, expected in self.crossing(name).items():
                if sorted(row[key]) != sorted(expected):
                    text = f"barrier '{label}' lists {key} {sorted(row[key])}, the ops say {sorted(expected)}"
                    yield Reason("barrier-mismatch", text, tuple(sorted(set(row[key]) ^ expected)))
        for name in self.regions.keys() - seen:
            held = tuple(sorted(set().union(*self.crossing(name).values())))
            yield Reason("barrier-missing", f"region '{name}' has no barrier", held)

    # Pools, aliases, gaps.

    def _roots(self, pool: str | None = None) -> list[int]:
        rows = self.buffers
        return [b for b in self.ids if rows[b]["alias_of"] is None and pool in (None, rows[b]["pool"])]

    def _members(self, root: int) -> list[int]:
        return [b for b in self.ids if self.buffers[b]["alias_of"] == root]

    def _pools(self) -> Iterator[Reason]:
        for unit in {row["alignment"] for row in self.buffers}:
            if unit.bit_count() != 1:
                yield Reason("alignment", f"alignment {unit} is not a power of two")
        for b in self._roots():
            row = self.buffers[b]
            kind, pool, unit = row["kind"], row["pool"], row["alignment"]
            own = [f"{kind}/{row['name']}"] if kind in ("state", "carry") else []
            if pool not in (*POOLS_OF.get(kind, ANYWHERE), *own):
                yield Reason("pool", f"{self.label_of(b)}: kind '{kind}' does not belong in pool '{pool}'", (b,))
            if unit < 512 and pool != "external":
                text = f"{self.label_of(b)}: alignment {unit}, in pool '{pool}' at least 512"
                yield Reason("alignment", text, (b,))

    def _groups(self) -> Iterator[Reason]:
        for b in self.ids:
            row, root = self.buffers[b], self.buffers[b]["alias_of"]
            if root is not None:
                base = self.buffers[root]
                if b == root or base["alias_of"] is not None:
                    text = f"{self.label_of(b)} is an alias of {self.label_of(root)}, which is not a root"
                    yield Reason("alias", text, (b, root))
                if row["pool"] != base["pool"]:
                    text = f"{self.label_of(b)} in pool '{row['pool']}' is an alias in pool '{base['pool']}'"
                    yield Reason("alias", text, (b, root))
            group = (b, *self._members(b))
            if len(group) > 1 and any(self.buffers[m]["rotate"] > 1 for m in group):
                names = ", ".join(map(self.label_of, group))
                yield Reason("alias", f"slots that rotate have no fixed address to share: {names}", group)

    def _gaps(self) -> Iterator[Reason]:
        for b, start, end, ordered, reasons in self._judged_gaps:
            if not ordered:
                text = f"{self.label_of(b)}: gap [{start}, {end}) is empty, out of order or outside its lifetime"
                yield Reason("gap", text, (b,))
            for reason in reasons:
                yield Reason("gap", f"{self.label_of(b)} claims no value in [{start}, {end}), but {reason}", (b,))

    @cached_property
    def _judged_gaps(self) -> list[tuple[int, int, int, bool, list[str]]]:
        """Owner, interval, whether it lies where it may, and why it holds a value."""
        found: list[tuple[int, int, int, bool, list[str]]] = []
        for b in self.ids:
            least = self.life[b][0]
            for start, end in self.buffers[b]["gaps"]:
                ordered = least <= start < end <= self.life[b][1]
                if not ordered:
                    found.append((b, start, end, False, []))
                    continue
                least, pool = end, self.buffers[b]["pool"]
                reasons = [why for m in (b, *self._members(b)) for why in self._values_in(m, start, end)]
                reasons += [f"pool '{pool}' holds its values always"] if pool != "workspace" else []
                found.append((b, start, end, True, reasons))
        return found

    def _values_in(self, b: int, start: int, end: int) -> Iterator[str]:
        """Say what value a buffer holds somewhere in an interval."""
        row, touched = self.buffers[b], self.touched(b)
        yield from (f"{self.label(i)} touches {self.label_of(b)}" for i in touched if i in range(start, end))
        for first, last in self.windows(b):
            if {*range(first, last)} & {*range(start, end)}:
                yield f"a barrier or a side stream holds {self.label_of(b)} over [{first}, {last})"
        later = [i for i in touched if i >= end]
        if not later and self.is_kept(b):
            yield f"{self.label_of(b)} is handed on at the end of the step"
        firsts = later[:1]
        for region in self.regions.values():
            around = region["start"] < start < region["end"]
            if around and not any(i < region["end"] for i in later):
                firsts += [i for i in touched if region["start"] <= i < start][:1]
        for i in firsts:
            anew = b in self.ops[i]["writes"] and b not in self.ops[i]["reads"]
            whole = anew and not self.cuts_of(i, b)
            held = row["kind"] in (*BORN, "carry", "host")
            outer = [name for name in self.around(self.ops[i]["region"]) if not self.is_within(b, name)]
            begins = anew and not held and i == touched[0] and all(self.regions[n]["start"] >= end for n in outer)
            if not whole and not begins:
                yield f"{self.label(i)} does not overwrite the whole of {self.label_of(b)} after it"

    def cuts_of(self, i: int, b: int) -> list[list[Any]]:
        """The slices by which an op sees a buffer that lives outside the loops; none if it is two operands."""
        op = self.ops[i]
        names = [name for name, at in op["operands"].items() if at == b]
        if len(names) != 1:
            return []
        loops = [name for name in self.around(op["region"]) if not self.is_within(b, name)]
        return [cut for cut in op["slices"] if cut[0] == names[0] and cut[2] in loops]

    def live(self, b: int) -> set[int]:
        """The ops at which a root holds a value: its lifetime but for the gaps that are true."""
        found = {*range(*self.life[b])}
        for owner, start, end, ordered, reasons in self._judged_gaps:
            if owner == b and ordered and not reasons and self.buffers[b]["alias_of"] is None:
                found -= {*range(start, end)}
        return found

    # Sizes and slices.

    def _slot_bytes(self, b: int) -> int:
        row = self.buffers[b]
        return prod(row["shape"]) * ITEM_BYTES[row["dtype"]]

    def raw_bytes(self, b: int) -> int:
        """All slots, unrounded."""
        return self._slot_bytes(b) * int(self.buffers[b]["rotate"])

    def covered(self, b: int) -> int:
        """To where a root's aliases reach."""
        return max((self.buffers[m]["alias_offset"] + self.buffers[m]["size"] for m in self._members(b)), default=0)

    def size(self, b: int) -> int:
        """Bytes of a buffer: each slot in whole units, and its aliases."""
        unit, slots = int(self.buffers[b]["alignment"]), int(self.buffers[b]["rotate"])
        return max(slots * -(-self._slot_bytes(b) // unit), -(-self.covered(b) // unit)) * unit

    def _sizes(self) -> Iterator[Reason]:
        for b in self.ids:
            row, expected, raw, covered = self.buffers[b], self.size(b), self.raw_bytes(b), self.covered(b)
            bare = row["pool"] == "external" and row["size"] == max(raw, covered)
            if row["size"] != expected and not bare:
                shape = f"{row['dtype']}{row['shape']} needs {raw} bytes in {row['rotate']} slots"
                aliases = f", aliases reach {covered}" if covered else ""
                text = f"{self.label_of(b)}: size {row['size']}, expected {expected}: {shape}{aliases}"
                yield Reason("size", text, (b,))

    def _cut_names(self) -> Iterator[Reason]:
        for i, op in enumerate(self.ops):
            for operand, axis, name, _ in op["slices"]:
                sliced = f"{self.label(i)} slices {operand}[{axis}] by '{name}'"
                if name not in self.around(op["region"]):
                    yield Reason("slice", f"{sliced}: no region around it", (), (i,))
                elif operand not in op["operands"]:
                    yield Reason("slice", f"{sliced}: no such operand", (), (i,))
            axes = [tuple(cut[:2]) for cut in op["slices"]]
            if any(axes.count(axis) > 1 for axis in axes):
                yield Reason("slice", f"{self.label(i)} slices one axis of an operand twice", (), (i,))

    def span(self, b: int, name: str) -> int:
        """Rows of a loop as a buffer has them: of a full iteration if it is at home inside, else of all."""
        region = self.regions[name]
        rows = min(region["rows"], region["extent"]) if self.is_within(b, name) else region["extent"]
        return int(rows)

    def _cuts(self) -> Iterator[Reason]:
        for i, op in enumerate(self.ops):
            for operand, axis, name, factor in op["slices"]:
                if name not in self.around(op["region"]) or operand not in op["operands"]:
                    continue
                b = op["operands"][operand]
                shape, span = self.buffers[b]["shape"], self.span(b, name)
                length = shape[axis] if axis < len(shape) else "no axis"
                if length != factor * span:
                    sliced = f"{self.label(i)} slices {self.label_of(b)} axis {axis} of {length} by '{name}'"
                    yield Reason("slice", f"{sliced}: {factor} x {span} expected", (b,), (i,))

    # Addresses.

    def _top(self, b: int) -> int:
        return int(self.buffers[b]["offset"] + self.buffers[b]["size"])

    def _bounds(self) -> Iterator[Reason]:
        page, rows = self.document["page_bytes"], self.buffers
        capacity = {pool["name"]: pool["capacity"] for pool in self.document["pools"]}
        for b in self.ids:
            offset, unit, pool = rows[b]["offset"], rows[b]["alignment"], rows[b]["pool"]
            if offset % unit and pool != "external":
                yield Reason("alignment", f"{self.label_of(b)}: offset {offset} is not a multiple of {unit}", (b,))
            if pool.startswith(("state/", "carry/")) and row_is_root(rows[b]) and offset:
                yield Reason("pool-bounds", f"{self.label_of(b)} starts at {offset} of its own pool, not at 0", (b,))
            if self._top(b) > capacity.get(pool, self._top(b)):
                text = f"{self.label_of(b)} ends at {self._top(b)}, pool '{pool}' has {capacity[pool]} bytes"
                yield Reason("pool-bounds", text, (b,))
        for pool in {row["pool"] for row in rows} - {"external"} - capacity.keys():
            text = f"pool '{pool}' is used but not listed"
            yield Reason("pool-bounds", text, tuple(self._roots(pool)))
        for pool, size in capacity.items():
            if pool in (*POOLS, *self._states()) and size % page:
                text = f"pool '{pool}': capacity {size} is not a multiple of the page, {page}"
                yield Reason("pool-bounds", text)

    def _aliases(self) -> Iterator[Reason]:
        for b in self.ids:
            row = self.buffers[b]
            at, root = row["alias_offset"], row["alias_of"]
            if root is None:
                if at:
                    yield Reason("alias", f"{self.label_of(b)} is no alias but has alias_offset {at}", (b,))
                continue
            base, end = self.buffers[root], at + row["size"]
            if row["offset"] - base["offset"] != at:
                text = f"{self.label_of(b)} is at {row['offset']}, its root {self.label_of(root)} at {base['offset']} + {at}"
                yield Reason("alias", text, (b, root))
            if end > base["size"]:
                text = (
                    f"{self.label_of(b)}: [{at}, {end}) is not inside the {base['size']} bytes of {self.label_of(root)}"
                )
                yield Reason("alias", text, (b, root))

    def _overlaps(self) -> Iterator[Reason]:
        for pool in POOLS:  # a state is alone in its own
            ids = [b for b in self._roots(pool) if self.buffers[b]["size"]]
            comes_and_goes = pool in ("workspace", "host")
            reason = "live at the same time" if comes_and_goes else "both live always"
            for b in ids:
                for c in ids[: ids.index(b)]:
                    common = self.live(b) & self.live(c) if comes_and_goes else {0} & {*range(self.end)}
                    starts = [self.buffers[x]["offset"] for x in (c, b)]
                    tops = [self._top(x) for x in (c, b)]
                    if (common or not comes_and_goes) and max(starts) < min(tops):
                        where = [
                            f"{self.label_of(x)} at [{s}, {t})" for x, s, t in zip((c, b), starts, tops, strict=True)
                        ]
                        ops = (max(common),) if common else ()
                        yield Reason("overlap", f"{where[0]} and {where[1]}: {reason}", (c, b), ops)

    # Streams.

    @cached_property
    def _before(self) -> list[set[int]]:
        """For each op the ops that have ended when it starts, by walks backwards through what waits for what."""
        waits: dict[Any, list[Any]] = {}
        latest: dict[str, list[Any]] = {}  # stream -> its latest event

        def happen(event: Any, stream: str, *others: str) -> None:
            waits[event] = [at for name in (stream, *others) for at in latest.get(name, [])]
            latest[stream] = [event]

        loops = sorted({(op["region"], op["stream"]) for op in self.ops if op["region"] and op["stream"] != "main"})
        for i, op in enumerate(self.ops):
            for name, side in loops:
                if self.regions[name]["end"] == i:
                    happen(("end", name, side), "main", side)
            for name, side in loops:
                if self.regions[name]["start"] == i:
                    happen(("start", name, side), side, "main")
            happen(i, op["stream"])
            waits[i] += [edge["from"] for edge in self.document["edges"] if edge["to"] == i and self._is_edge(edge)]

        def ended(event: Any) -> set[Any]:
            return {at for other in waits[event] for at in (other, *ended(other))}

        return [{at for at in ended(i) if type(at) is int} for i in range(self.end)]

    def _unordered(self, i: int) -> set[int]:
        """The ops of the same iteration that may run beside an op."""
        return {j for j in range(self.end) if j != i and j not in self._before[i] and i not in self._before[j]}

    def share_bytes(self, a: int, b: int) -> bool:
        """Whether two members of a group have bytes of their own in common."""
        starts = [int(self.buffers[x]["alias_offset"]) for x in (a, b)]
        ends = [start + self.raw_bytes(x) for start, x in zip(starts, (a, b), strict=True)]
        return max(starts) < min(ends)

    def _group_of(self, b: int) -> list[int]:
        root = b if self.buffers[b]["alias_of"] is None else self.buffers[b]["alias_of"]
        return [root, *self._members(root)]

    def _races(self) -> Iterator[Reason]:
        for i, op in enumerate(self.ops):
            for b in op["writes"]:
                for m in self._group_of(b):
                    racing = self._unordered(i).intersection(self.touched(m))
                    if racing and self.share_bytes(b, m):
                        other = max(racing)
                        touches = f"{self.label(other)} touches {self.label_of(m)}"
                        text = f"{self.label(i)} writes {self.label_of(b)}, {touches}, in no order"
                        yield Reason("stream-race", text, tuple(sorted({b, m})), tuple(sorted((i, other))))
        for i, op in enumerate(self.ops):
            loop = self.regions.get(op["region"])
            if loop is not None and op["stream"] != "main" and loop["count"] > 1 and not self._follows_main(i, loop):
                for b in self.ids:
                    why = self._iterations_clash(loop, b) if i in self.touched(b) else ""
                    if why:
                        where = f"{self.label(i)} runs beside other iterations of loop '{loop['name']}'"
                        yield Reason("stream-race", f"{where}: {self.label_of(b)} {why}", (b,), (i,))

    def _follows_main(self, i: int, loop: Row) -> bool:
        """Whether ops of main in the same iteration fork and join a side op."""
        main = [j for j in range(loop["start"], loop["end"]) if self.ops[j]["stream"] == "main"]
        return any(j in self._before[i] for j in main) and any(i in self._before[j] for j in main)

    def _iterations_clash(self, loop: Row, b: int) -> str:
        row, name, aliases = self.buffers[b], loop["name"], "shares its storage with aliases"
        inside = range(loop["start"], loop["end"])
        if row["region"] == name:
            return aliases if len(self._group_of(b)) > 1 else "has one slot" if row["rotate"] < 2 else ""
        if row["pool"] == "workspace":
            return f"has its home outside, in {row['region']!r}"
        near = [m for m in self._group_of(b) if self.share_bytes(b, m)]
        if not any(i in inside for m in near for i in self._written(m)):
            return ""
        if near != [b]:
            return aliases
        seen = set()
        for i in inside:
            for operand in [o for o, at in self.ops[i]["operands"].items() if at == b and i in self.touched(b)]:
                cuts = [(axis, factor) for o, axis, by, factor in self.ops[i]["slices"] if (o, by) == (operand, name)]
                seen.add(cuts[0] if cuts else None)
        alike = len(seen) == 1 and None not in seen
        return "" if alike else "is written in the loop, and not all its ops see the same rows of it"

    def _meetings(self) -> Iterator[Reason]:
        """Roots that live one after the other at common addresses, touched in no order all the same."""
        sides = any(op["stream"] != "main" for op in self.ops)
        clashing = {self.buffers[reason.buffers[0]]["pool"] for reason in self._overlaps()}
        for pool in {"workspace", "host"} - clashing if sides else ():
            ids = [b for b in self._roots(pool) if self.buffers[b]["size"]]
            for c, b in ((c, b) for b in ids for c in ids if c < b):
                touched = [{i for m in (x, *self._members(x)) for i in self.touched(m)} for x in (c, b)]
                racing = {i for i in touched[0] if self._unordered(i) & touched[1]}
                starts, tops = [self.buffers[x]["offset"] for x in (c, b)], [self._top(x) for x in (c, b)]
                if racing and max(starts) < min(tops):
                    where = [f"{self.label_of(x)} at [{s}, {t})" for x, s, t in zip((c, b), starts, tops, strict=True)]
                    text = f"{where[0]} and {where[1]}: ops of two streams touch them in no order"
                    yield Reason("stream-race", text, (c, b), (max(racing),))

    # Totals.

    def live_bytes(self) -> list[int]:
        """Bytes of the workspace's roots that hold a value, by op."""
        live = {b: self.live(b) for b in self._roots("workspace")}
        return [sum(self.buffers[b]["size"] for b, ops in live.items() if i in ops) for i in range(self.end)]

    def pages(self, pool: str) -> int:
        """Bytes of a pool in whole pages; of all states' together, of "state"."""
        if pool == "state":
            return sum(map(self.pages, self._states()))
        page = int(self.document["page_bytes"])
        return -(-self.reach(pool) // page) * page

    def _states(self) -> list[str]:
        """Pools of states and carries: pools of buffers, and listed pools."""
        named = (*(row["pool"] for row in self.buffers), *(pool["name"] for pool in self.document["pools"]))
        return sorted(
            {name for name in named if name.startswith(("state/", "carry/")) and name not in ("state/", "carry/")}
        )

    def reach(self, pool: str) -> int:
        """Where a pool's last buffer ends."""
        return max((self._top(b) for b in self.ids if self.buffers[b]["pool"] == pool), default=0)

    def _totals(self) -> Iterator[Reason]:
        d, components = self.document, self.document["components"]
        peak, bound = self.reach("workspace"), max(self.live_bytes(), default=0)
        total, host = sum(components.values()), d["host_bytes"]
        budgets = d["budget_bytes"], d["host_budget_bytes"]
        within = f"{total} is within {budgets[0]}, and {host} of the host within {budgets[1]}"
        facts = [
            ("peak", "peak_bytes", peak, "the top of the workspace's buffers"),
            ("lower-bound", "lower_bound_bytes", bound, "the largest live set"),
            ("optimal", "optimal", peak == bound, "whether peak and lower bound are equal"),
            ("total", "total_bytes", total, "the sum of the components"),
            ("host", "host_bytes", self.pages("host"), "the pages in use"),
            ("fits", "fits", total <= budgets[0] and host <= budgets[1], f"whether {within}"),
        ]
        for code, key, derived, meaning in facts:
            if d[key] != derived:
                yield Reason(code, f"{key} is {d[key]}, {meaning}: {derived}")
        for pool in ("workspace", "weights", "state"):
            if components[pool] != self.pages(pool):
                text = f"components.{pool} is {components[pool]}, the pages in use: {self.pages(pool)}"
                yield Reason("components", text)

    def _capacities(self) -> Iterator[Reason]:
        d = self.document
        capacity = {pool["name"]: pool["capacity"] for pool in d["pools"]}
        for name in self._states():
            if capacity.get(name, 0) != self.pages(name):
                text = f"pool '{name}' has {capacity.get(name)} bytes, its buffer takes {self.pages(name)} in pages"
                yield Reason("pool", text)
        for name in POOLS:
            stated = d["host_bytes"] if name == "host" else d["components"][name]
            if capacity.get(name, 0) != stated:
                yield Reason("pool", f"pool '{name}' has {capacity.get(name)} bytes, the totals say {stated}")
        for pool in d["pools"]:
            name, device = pool["name"], pool["device"]
            if name not in (*POOLS, "external", *self._states()):
                known = "carry/NAME, external, host, state/NAME, weights, workspace"
                yield Reason("pool", f"unknown pool {name!r}; known: {known}")
            elif name != "external" and (device == "cpu") != (name == "host" or d["backend"] == "cpu"):
                yield Reason("pool", f"pool '{name}' is on {device!r}, the backend is {d['backend']!r}")

    # Values.

    def _unwritten(self) -> Iterator[Reason]:
        """Reads of cells that nothing has written yet, of buffers that are written first."""
        for b in self.ids:
            if self.buffers[b]["kind"] in (*BORN, "carry") or not self.touched(b) or self.is_read_first(b):
                continue
            by_op = {i: self._cuts_by_operand(i, b) for i in self.touched(b)}
            axes = sorted({tuple(cut[1:]) for some in by_op.values() for cuts in some for cut in cuts})
            passes = [range(min(2, self.regions[axis[1]]["count"])) for axis in axes]
            unwritten: set[Cell] = {tuple(zip(axes, at, strict=True)) for at in product(*passes)}
            early = set()
            for i, iterations in self.launches():
                views = [{(tuple(cut[1:]), iterations[cut[2]]) for cut in cuts} for cuts in by_op.get(i, [])]
                if i in self._read(b) and any(view <= {*cell} for view in views for cell in unwritten):
                    early.add(i)
                if i in self._written(b) and i not in self._read(b):
                    view = views[0] if len(views) == 1 else set()
                    unwritten = {cell for cell in unwritten if not view <= {*cell}}
            for i in sorted(early):
                text = f"{self.label(i)} reads slices of {self.label_of(b)} that no iteration has written yet"
                yield Reason("read-before-write", text, (b,), (i,))

    def _cuts_by_operand(self, i: int, b: int) -> list[list[list[Any]]]:
        """The slices by which each operand of an op sees a buffer that lives outside the loops; the whole, if none does."""
        op = self.ops[i]
        loops = [name for name in self.around(op["region"]) if not self.is_within(b, name)]
        named = [name for name, at in op["operands"].items() if at == b] or [""]
        return [[cut for cut in op["slices"] if cut[0] == name and cut[2] in loops] for name in named]

    # Values of alias groups.

    def stale(self) -> list[Reason]:
        """Reads, overwrites and hand-ons of a value that another member of its group has overwritten."""
        return [reason for root in self._roots() if self._members(root) for reason in _Group(self, root).reasons()]

    def launches(self) -> Iterator[tuple[int, dict[str, int]]]:
        """Ops in the order in which they run, loops that run more than once for two iterations."""
        yield from self._run(None, 0, self.end, {})

    def _run(
        self, inside: str | None, start: int, end: int, passes: dict[str, int]
    ) -> Iterator[tuple[int, dict[str, int]]]:
        at = start
        while at < end:
            loops = [name for name, row in self.regions.items() if row["parent"] == inside and row["start"] == at]
            if not loops:
                yield at, passes
                at += 1
                continue
            row = self.regions[loops[0]]
            for iteration in range(min(2, row["count"])):
                yield from self._run(loops[0], at, row["end"], {**passes, loops[0]: iteration})
            at = row["end"]

    # Statements.

    def _config(self) -> Iterator[Reason]:
        config, dims = self.document["config"], self.document["dims"]
        for name, row in self.regions.items():
            knob, dim, rows, extent = row["knob"], row["dim"], row["rows"], row["extent"]
            if config.get(knob) != rows:
                text = f"region '{name}' has {rows} rows, config says {knob}={config.get(knob, 'nothing')!r}"
                yield Reason("config", text)
            if dims.get(dim) != extent:
                text = f"region '{name}' runs over {extent} {dim}, dims say {dims.get(dim, 'nothing')!r}"
                yield Reason("dims", text)
        knobs = [row["knob"] for row in self.regions.values()]
        idle = sorted(knob for knob in config if type(config[knob]) is int and knob not in knobs)
        if idle:
            yield Reason("config", f"{', '.join(idle)}: rows without a region")

    def _dtype(self) -> Iterator[Reason]:
        weights = [row["dtype"] for row in self.buffers if row["kind"] == "weight" or row["tensor"] is not None]
        claimed = self.document["dtype"]
        if any(weights.count(dtype) > weights.count(claimed) for dtype in weights):
            counts = ", ".join(f"{weights.count(dtype)} in {dtype}" for dtype in sorted(set(weights)))
            yield Reason("dtype", f"the plan is said to be in {claimed!r}, its weights are: {counts}")

    def _dims(self) -> Iterator[Reason]:
        d, dims = self.document, self.document["dims"]
        shipped = d["phase"] == "full_step"
        missing = [dim for dim in ("tokens", "seqs", "span", "masked") if dim not in dims]
        if missing and shipped:
            text = f"a full_step has tokens, seqs, span, masked; missing {', '.join(missing)}"
            yield Reason("dims", text)
        if (
            {"tokens", "seqs"} <= dims.keys()
            and d["fits"]
            and dims["seqs"] == 1
            and dims["tokens"] > d["max_ctx_tokens"]
        ):
            text = f"max_ctx_tokens is {d['max_ctx_tokens']}, this plan fits with {dims['tokens']}"
            yield Reason("context", text)
        if missing or not shipped:
            return
        tokens, seqs, span = dims["tokens"], dims["seqs"], dims["span"]
        given = [row["shape"][0] for row in self.buffers if row["kind"] in ("input", "state") and row["shape"]]
        for dim, value in dims.items():
            length = seqs + 1 if dim == "seqs" else value
            if dim not in ("span", "kv_heads") and length not in given:
                yield Reason("dims", f"no input or state has {value} {dim}")
        blocks = any(op["attrs"].get("block", 0) for op in self.ops)
        least = (tokens + seqs) / (2 * seqs) if blocks else tokens / seqs
        if seqs > tokens or span < least or span > tokens - seqs + 1:
            text = f"queries in {seqs} sequences of {tokens} tokens cannot see {span} keys on average"
            yield Reason("dims", text)

    def _implementations(self) -> Iterator[Reason]:
        d = self.document
        chosen, backend = d["implementations"], d["backend"]
        special = {"attention": "cudnn", "kv_attention": "hopper", "prefix_attention": "hopper"}
        needs = sorted(special.keys() & {op["kernel"] for op in self.ops}) if backend == "cuda" else []
        if sorted(chosen) != needs:
            names, wanted = ", ".join(sorted(chosen)) or "nothing", ", ".join(needs) or "none"
            yield Reason("implementation", f"chosen for {names}, on {backend} the graph needs {wanted}")
        for kernel, name in chosen.items():
            known = (special[kernel], "triton") if kernel in special else ()
            if name not in known:
                text = f"{kernel} has no {name!r}; known: {', '.join(known) or 'none'}"
                yield Reason("implementation", text)
                continue
            if name == "hopper" and d.get("capability", 0) != 90:
                text = f"{kernel} by 'hopper' needs a card of compute capability 90, got {d.get('capability', 0)}"
                yield Reason("implementation", text)
            suits, takes = {
                "cudnn": (self._suits_cudnn, "one sequence without blocks, 16-bit floats and heads of 8, 16 … 128"),
                "hopper": (self._suits_hopper, "bfloat16 and heads of 64 or 128"),
            }.get(name, (lambda op: True, ""))
            illegal = [i for i, op in enumerate(self.ops) if op["kernel"] == kernel and not suits(op)]
            if illegal:
                yield Reason("implementation", f"{self.label(illegal[0])}: {name} takes {takes}", (), (illegal[0],))

    def _suits_hopper(self, op: Row) -> bool:
        q = op["operands"].get("q")
        return op["attrs"].get("head_size") in (64, 128) and q is not None and self.buffers[q]["dtype"] == "bfloat16"

    def _suits_cudnn(self, op: Row) -> bool:
        attrs, operands = op["attrs"], op["operands"]
        if "q" not in operands or "cu_seqlens" not in operands or attrs.get("block", 0):
            return False
        q, bounds = (self.buffers[operands[name]] for name in ("q", "cu_seqlens"))
        size = attrs.get("head_size")
        return (
            type(size) is int
            and size in range(8, 129, 8)
            and q["dtype"] in ("float16", "bfloat16")
            and prod(bounds["shape"]) == 2
        )

    def _profile(self) -> Iterator[Reason]:
        d = self.document
        mesh, fixed = d["mesh"], d["components"]["context"] + d["components"]["library"]
        if mesh["size"] != prod(mesh["axes"].values()):
            yield Reason("mesh", f"{mesh['size']} devices in axes {mesh['axes']}")
        if d["device_memory_bytes"] <= fixed:
            text = f"{d['device_memory_bytes']} bytes of memory, context and libraries take {fixed}"
            yield Reason("device", text)

    def _formula(self) -> Iterator[Reason]:
        d, live, slack = self.document, self.live_bytes(), self._slack()
        loops = {f"{row['knob']}_rows": min(row["rows"], row["extent"]) for row in self.regions.values()}
        names = {**d["dims"], **loops}
        factor = rf"\*({'|'.join(map(re.escape, names)) or '(?!)'})(\*\*[1-9])?"
        term = rf"-?[0-9]{{1,40}}({factor})*"
        highest = 0
        for line in d["formula"]:
            expr, at = line["expr"], [i for i, op in enumerate(self.ops) if op["name"] == line["at"]]
            if not re.fullmatch(rf"{term}( \+ {term})*", expr):
                yield Reason("formula", f"'{expr}' is no sum of products of dims and rows")
                continue
            if not at:
                yield Reason("formula", f"'{expr}' is at no op: {line['at']!r}")
                continue
            value = eval(re.sub(r"\b0+(?=[0-9])", "", expr), {}, names)
            highest = max(highest, value)
            most, least = live[at[0]], live[at[0]] - slack[at[0]]
            if value > most or value < least:
                text = f"'{expr}' is {value}, at {self.label(at[0])} {least} to {most} bytes live"
                yield Reason("formula", text, (), (at[0],))
        if max(live) - max(slack) > highest:
            yield Reason("formula", f"its maximum is {highest}, the largest live set {max(live)}")

    def _slack(self) -> list[int]:
        """By op, what rounding adds to the live bytes, and storage beyond an alias group's smallest member."""
        roots = self._roots("workspace")
        spare = {b: self.buffers[b]["size"] - min(map(self.raw_bytes, (b, *self._members(b)))) for b in roots}
        live = {b: self.live(b) for b in roots}
        return [sum(spare[b] for b in roots if i in live[b]) for i in range(self.end)]

    def _trace(self) -> Iterator[Reason]:
        d = self.document
        config, page = d["config"], d["page_bytes"]
        for k, step in enumerate(d["trace"]):
            if step["config"].keys() != config.keys():
                different = set(step["config"]) ^ set(config)
                text = f"trace[{k}] and the plan have different knobs: {', '.join(sorted(different))}"
                yield Reason("config", text)
                continue
            options = [key for key, value in config.items() if isinstance(value, str)]
            if any(step["config"][key] != config[key] for key in options):
                continue
            if all(op["name"] != step["bottleneck"] for op in self.ops):
                yield Reason("trace", f"trace[{k}]: no op is named {step['bottleneck']!r}")
            total = d["total_bytes"] - d["components"]["workspace"] + -(-step["peak_bytes"] // page) * page
            if step["total_bytes"] != total:
                text = f"trace[{k}].total_bytes is {step['total_bytes']}, fixed bytes and its peak give {total}"
                yield Reason("trace", text)
            claims = (step["peak_bytes"], step["predicted_ms"]), (d["lower_bound_bytes"], d["predicted_step_ms"])
            if step["config"] == config and claims[0] != claims[1]:
                text = f"trace[{k}] has the plan's configuration and {claims[0]}, the plan {claims[1]}"
                yield Reason("trace", text)


Cell = tuple[tuple[tuple[Any, ...], int], ...]


class _Group:
    """An alias group, each member as the cells into which the slices of the group's loops cut it."""

    def __init__(self, oracle: Oracle, root: int) -> None:
        self.oracle = oracle
        self.rows = oracle.buffers
        self.group = [b for b in oracle.ids if b == root or oracle.buffers[b]["alias_of"] == root]
        cuts = sorted({cut for i in range(oracle.end) for b in self.group for cut in self.cuts(i, b)})
        passes = [range(min(2, oracle.regions[cut[1]]["count"])) for cut in cuts]
        self.cells: set[Cell] = {tuple(zip(cuts, at, strict=True)) for at in product(*passes)}
        self.held = {b for b in self.group if self.rows[b]["kind"] in (*BORN, "carry", "host")}
        self.lost: dict[int, set[Cell]] = {b: set() for b in self.group}
        self.lost_whole: set[int] = set()
        self.culprit: dict[int, int] = {}
        self.found: dict[tuple[int, int], str] = {}

    def cuts(self, i: int, b: int) -> list[tuple[Any, ...]]:
        """Axis, loop and factor of each slice of a member."""
        return sorted(tuple(cut[1:]) for cut in self.oracle.cuts_of(i, b))

    def seen(self, i: int, b: int, passes: dict[str, int]) -> set[Cell]:
        """The cells of a member that an op sees."""
        here = {(cut, passes[cut[1]]) for cut in self.cuts(i, b)}
        return {cell for cell in self.cells if here <= {*cell}}

    def alike(self, a: int, b: int, *keys: str) -> bool:
        """Whether two members agree in some fields."""
        return all(self.rows[a][key] == self.rows[b][key] for key in keys)

    def reasons(self) -> Iterator[Reason]:
        for i, passes in self.oracle.launches():
            op = self.oracle.ops[i]
            for b in self.group:
                if b in op["reads"] and self.seen(i, b, passes) & self.lost[b]:
                    culprit = self.oracle.label(self.culprit[b])
                    self.say(i, b, f"reads {self.oracle.label_of(b)}, overwritten by {culprit}")
            order = sorted(self.group, key=lambda b: self.rows[b]["alias_of"] is not None)
            for new in order:
                if new in op["writes"]:
                    self.write(i, new, passes)
        for b in self.group:
            if self.lost[b] and self.oracle.is_kept(b):
                self.say(self.culprit[b], b, f"overwrites {self.oracle.label_of(b)}, which the step hands on")
        for (i, b), text in self.found.items():
            yield Reason("alias-stale-read", f"{self.oracle.label(i)} {text}", (b,), (i,))

    def say(self, i: int, b: int, text: str) -> None:
        """One reason per op and buffer: the first."""
        self.found.setdefault((i, b), text)

    def write(self, i: int, new: int, passes: dict[str, int]) -> None:
        """Let an op write a member: others lose what they share with it."""
        op, written = self.oracle.ops[i], self.seen(i, new, passes)
        for old in self.group:
            if old == new or not self.oracle.share_bytes(old, new):
                continue
            self.judge(i, old, new)
            if old in self.held:
                cut = self.alike(old, new, "alias_offset", "shape", "dtype")
                self.lost[old] |= written if cut else self.cells
                if not cut or not self.cuts(i, new):
                    self.lost_whole.add(old)
                self.culprit[old] = i
        if new not in op["reads"]:
            self.held.add(new)
            self.lost[new] -= written
            self.lost_whole.discard(new)

    def judge(self, i: int, old: int, new: int) -> None:
        """Whether an op may write one member over another in the first place."""
        op, label = self.oracle.ops[i], self.oracle.label_of
        cuts = self.cuts(i, new)
        same_rows = cuts == self.cuts(i, old) and (not cuts or self.alike(old, new, "alias_offset", "shape", "dtype"))
        same_bytes = self.alike(old, new, "alias_offset") and self.oracle.raw_bytes(old) == self.oracle.raw_bytes(new)
        permitted = [new, old] in op["inplace"] and same_rows and same_bytes
        if old in op["writes"] or (old in op["reads"] and not permitted):
            self.say(i, old, f"writes {label(new)} over its own operand {label(old)}")
        until = i + 1 if permitted else i
        held = old in self.held and old not in self.lost_whole
        if held and any(start <= i and end > until for start, end in self.oracle.windows(old)):
            self.say(i, old, f"overwrites {label(old)}, which a barrier or stream holds")


def sorted_reasons(reasons: Iterable[Any]) -> list[Reason]:
    """Violations or reasons in one order."""
    return sorted(Reason(r.code, r.message, tuple(r.buffers), tuple(r.ops)) for r in reasons)
