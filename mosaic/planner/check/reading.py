"""Read a plan into columns: fields and types, and nothing that one field says about another.

From a document, or from a planner's `Records` and `Numbers`, which a document is written from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from math import inf
from operator import itemgetter
from types import NoneType
from typing import Any, Final, NamedTuple

from mosaic.planner.check.columns import (
    COMPONENTS,
    ITEM_BYTES,
    KINDS,
    KNOWN_POOLS,
    Barrier,
    Columns,
    Loop,
    Region,
    Skeleton,
    Violation,
    is_known_pool,
)

_BACKENDS: Final = frozenset({"cuda", "cpu"})

Types = frozenset[type]
INTEGER: Final[Types] = frozenset({int})
NUMBER: Final[Types] = frozenset({int, float})
BOOLEAN: Final[Types] = frozenset({bool})
TEXT: Final[Types] = frozenset({str})
_MAP: Final[Types] = frozenset({dict})
_LIST: Final[Types] = frozenset({list, tuple})
_INT_OR_NULL: Final[Types] = frozenset({int, NoneType})
_STR_OR_NULL: Final[Types] = frozenset({str, NoneType})
_SETTING: Final[Types] = frozenset({int, str, NoneType})  # of a configuration: rows, off, an option
_PLAIN: Final[Types] = frozenset({int, float, str, bool})  # of an attribute


def _are_strings(values: Sequence[Any]) -> bool:
    """Whether all JSON values are strings; several times faster than asking each."""
    try:
        "".join(values)
    except TypeError:
        return False
    return True


def _are_integers(values: Sequence[Any]) -> bool:
    """Whether the sum of JSON values, thus each, is an integer; faster than asking each (`true` counts as 1)."""
    try:
        return type(sum(values)) is int
    except TypeError:
        return False


_QUICK: Final[Mapping[Types, Callable[[Sequence[Any]], bool]]] = {TEXT: _are_strings, INTEGER: _are_integers}

_Found = list[Violation]
_Named = Mapping[str, tuple[Any, ...]]  # field -> column


class _Table(NamedTuple):
    """The fields of a list of JSON objects and the types that each may have."""

    label: str
    fields: Mapping[str, Types]

    def named(self, document: Mapping[str, Any], found: _Found) -> _Named:
        """Return the columns of a document's list by field; of no use if that found a row malformed."""
        return dict(zip(self.fields, self._columns(document[self.label], found), strict=False))

    def _columns(self, rows: Sequence[Any], found: _Found) -> tuple[tuple[Any, ...], ...]:
        """Transpose rows into one tuple per field; empty tuple if a row lacks one."""
        if not _MAP.issuperset(map(type, rows)):
            _fail(found, f"{self.label}: every entry must be an object")
            return ()
        if not rows:
            return ((),) * len(self.fields)
        try:
            columns = tuple(zip(*map(itemgetter(*self.fields), rows), strict=True))
        except KeyError:
            self._report_missing(rows, found)
            return ()
        for (name, allowed), column in zip(self.fields.items(), columns, strict=True):
            quick = _QUICK.get(allowed)
            if not (quick(column) if quick is not None else allowed.issuperset(map(type, column))):
                self._report_types(name, allowed, column, found)
        return columns

    def _report_missing(self, rows: Sequence[Any], found: _Found) -> None:
        for i, row in enumerate(rows):
            missing = [name for name in self.fields if name not in row]
            if missing:
                _fail(found, f"{self.label}[{i}]: missing {', '.join(missing)}")

    def _report_types(self, name: str, allowed: Types, column: Sequence[Any], found: _Found) -> None:
        for i, value in enumerate(column):
            if type(value) not in allowed:
                _fail(found, f"{self.label}[{i}].{name}: expected {type_names(allowed)}, got {value!r}")


_HEADER: Final[Mapping[str, Types]] = {
    "mosaic_version": TEXT, "model": TEXT, "phase": TEXT, "dtype": TEXT, "dims": _MAP, "device": TEXT,
    "backend": TEXT, "estimated": BOOLEAN, "device_memory_bytes": INTEGER, "page_bytes": INTEGER, "mesh": _MAP,
    "implementations": _MAP, "pools": _LIST, "budget_bytes": INTEGER, "host_budget_bytes": INTEGER, "config": _MAP,
    "fits": BOOLEAN, "components": _MAP, "total_bytes": INTEGER, "host_bytes": INTEGER, "peak_bytes": INTEGER,
    "lower_bound_bytes": INTEGER, "optimal": BOOLEAN, "max_ctx_tokens": INTEGER, "predicted_step_ms": NUMBER,
    "solver": TEXT,
}  # fmt: skip
_LISTS: Final = ("regions", "barriers", "edges", "ops", "buffers")
_STATEMENTS: Final = ("formula", "trace")
_TOTALS: Final = (
    "budget_bytes", "host_budget_bytes", "total_bytes", "host_bytes", "peak_bytes", "lower_bound_bytes",
)  # fmt: skip
_POOL: Final = _Table("pools", {"name": TEXT, "device": TEXT, "capacity": INTEGER})
_REGION: Final = _Table("regions", {
    "name": TEXT, "knob": TEXT, "dim": TEXT, "start": INTEGER, "end": INTEGER, "parent": _STR_OR_NULL,
})  # fmt: skip
_BARRIER: Final = _Table("barriers", {
    "name": TEXT, "region": _STR_OR_NULL, "start": INTEGER, "end": INTEGER, "inputs": _LIST, "outputs": _LIST,
    "carried": _LIST,
})  # fmt: skip
_FORM: Final = _Table("formula", {"expr": TEXT, "at": TEXT})
_STEP: Final = _Table("trace", {
    "config": _MAP, "move": TEXT, "bottleneck": TEXT, "peak_bytes": INTEGER, "total_bytes": INTEGER,
    "predicted_ms": NUMBER,
})  # fmt: skip
_EDGE: Final = _Table("edges", {"kind": TEXT, "from": INTEGER, "to": INTEGER})
_OP: Final = _Table("ops", {
    "index": INTEGER, "name": TEXT, "kernel": TEXT, "stream": TEXT, "region": _STR_OR_NULL, "reads": _LIST,
    "writes": _LIST, "operands": _MAP, "attrs": _MAP, "inplace": _LIST, "slices": _LIST,
})  # fmt: skip
_BUFFER: Final = _Table("buffers", {
    "id": INTEGER, "name": TEXT, "kind": TEXT, "pool": TEXT, "start": INTEGER, "end": INTEGER, "gaps": _LIST,
    "alias_of": _INT_OR_NULL, "dtype": TEXT, "alignment": INTEGER, "region": _STR_OR_NULL, "tensor": _STR_OR_NULL,
    "rotate": INTEGER,
})  # fmt: skip
# The numbers, by the list that has them in a document.
_WORK: Final = _Table("ops", {"flops": INTEGER, "bytes": INTEGER})
_PLACE: Final = _Table("buffers", {"offset": INTEGER, "size": INTEGER, "alias_offset": INTEGER, "shape": _LIST})
_LOOP: Final = _Table("regions", {"extent": INTEGER, "rows": INTEGER, "count": INTEGER})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Records:
    """The rows of a document without their numbers: what a planner keeps for all plans that differ in sizes alone.

    Rows may have fields that are not named here. They must not change afterwards.

    Parameters
    ----------
    ops
        Without `flops` and `bytes`.
    buffers
        Without `offset`, `size`, `alias_offset` and `shape`.
    regions
        Without `extent`, `rows` and `count`.
    barriers, edges
        As in a document.
    """

    ops: Sequence[Mapping[str, Any]]
    buffers: Sequence[Mapping[str, Any]]
    regions: Sequence[Mapping[str, Any]]
    barriers: Sequence[Mapping[str, Any]]
    edges: Sequence[Mapping[str, Any]]


class Numbers(NamedTuple):
    """The numbers of a plan's buffers and regions, by columns."""

    offset: Sequence[int]
    size: Sequence[int]
    alias_offset: Sequence[int]
    shape: Sequence[Sequence[int]]
    extent: Sequence[int]
    rows: Sequence[int]
    num_chunks: Sequence[int]


class Work(NamedTuple):
    """A plan's claims on each op's work, all iterations together; memory does not depend on them."""

    flops: Sequence[int]
    moved: Sequence[int]


# Documents.


def read_document(document: Mapping[str, Any], found: _Found) -> tuple[Records, Numbers] | None:
    """Check the header and take a document apart; None if a field is missing or of a wrong type."""
    read_header(document, found)
    if not _read_fields(document, dict.fromkeys(_LISTS, _LIST), found):
        return None
    place, loop = _PLACE.named(document, found), _LOOP.named(document, found)
    if found:
        return None
    return Records(**{key: document[key] for key in _LISTS}), Numbers(*place.values(), *loop.values())


def read_header(header: Mapping[str, Any], found: _Found) -> bool:
    """Check what a document holds besides its lists of rows; False if a field is missing or of a wrong type."""
    if _read_fields(header, _HEADER, found):
        pool = _POOL.named(header, found)
        if not found:
            _read_settings(header, pool, found)
            _report_repeated("pools", pool["name"], found)
    return not found


def read_statements(document: Mapping[str, Any], found: _Found) -> Work | None:
    """Check the fields of formula and trace; return each op's FLOPs and bytes."""
    if not _read_fields(document, dict.fromkeys(_STATEMENTS, _LIST), found) or type(document.get("ops")) not in _LIST:
        return None
    _FORM.named(document, found)
    step, work = _STEP.named(document, found), _WORK.named(document, found)
    if found:
        return None
    _read_configs(step["config"], found)
    _read_times("trace.predicted_ms", step["predicted_ms"], found)
    bounded = [(f"trace.{key}", step[key], None) for key in ("peak_bytes", "total_bytes")]
    _read_bounded([*bounded, *((f"ops.{key}", work[key], None) for key in work)], found)
    return None if found else Work(*work.values())


def _read_fields(document: Mapping[str, Any], fields: Mapping[str, Types], found: _Found) -> bool:
    before = len(found)
    for key, allowed in fields.items():
        if key not in document:
            _fail(found, f"missing {key}")
        elif type(document[key]) not in allowed:
            _fail(found, f"{key}: expected {type_names(allowed)}, got {type(document[key]).__name__}")
    return len(found) == before


# Rows.


def read_skeleton(records: Records, found: _Found) -> Skeleton | None:
    """Transpose rows into columns; None if a field is missing or of a wrong type."""
    lists = {key: getattr(records, key) for key in _LISTS}
    region, barrier, edge, op, buffer = (
        table.named(lists, found) for table in (_REGION, _BARRIER, _EDGE, _OP, _BUFFER)
    )
    if found:
        return None
    if not _PLAIN.issuperset(map(type, chain.from_iterable(map(dict.values, op["attrs"])))):
        _fail(found, "ops.attrs: expected numbers, strings and booleans")
    for label, numbers in (("ops[i].index must be i", op["index"]), ("buffers[i].id must be i", buffer["id"])):
        if numbers != tuple(range(len(numbers))):
            _fail(found, label, "id")
    _read_nested(op, buffer, barrier, edge, found)
    for label, names in (("ops", op), ("buffers", buffer), ("regions", region)):
        _report_repeated(label, names["name"], found)
    if found:
        return None
    return Skeleton(
        found=found, regions=dict(zip(region["name"], map(Region._make, zip(*region.values(), strict=True)), strict=True)),
        barriers=list(map(Barrier._make, zip(*barrier.values(), strict=True))),
        edges=list(zip(*edge.values(), strict=True)),
        op_name=op["name"], kernel=op["kernel"], stream=op["stream"], op_region=op["region"], reads=op["reads"],
        writes=op["writes"], operands=op["operands"], attrs=op["attrs"], inplace=op["inplace"], slices=op["slices"],
        name=buffer["name"], kind=buffer["kind"], pool=buffer["pool"], claimed_start=buffer["start"],
        claimed_end=buffer["end"], gaps=buffer["gaps"], alias_of=buffer["alias_of"], dtype=buffer["dtype"],
        alignment=buffer["alignment"], home=buffer["region"], tensor=buffer["tensor"], rotate=buffer["rotate"],
    )  # fmt: skip


def read_columns(skeleton: Skeleton, header: Mapping[str, Any], numbers: Numbers, found: _Found) -> Columns | None:
    """Join a skeleton with the numbers of one plan; None if they are no such numbers."""
    _read_bounded(
        (
            ("buffers.shape", list(chain.from_iterable(numbers.shape)), None),
            ("buffers.offset", numbers.offset, None),
            ("buffers.size", numbers.size, None),
            ("buffers.alias_offset", numbers.alias_offset, None),
            ("regions", [*numbers.extent, *numbers.rows, *numbers.num_chunks], None),
        ),
        found,
    )
    lengths, expected = [*map(len, numbers)], [len(skeleton.name)] * 4 + [len(skeleton.regions)] * 3
    if lengths != expected:
        _fail(found, f"numbers of {lengths} buffers and regions, {expected} expected")
    if found:
        return None
    kept = {entry.name: getattr(skeleton, entry.name) for entry in fields(Skeleton)}
    loops = map(Loop, numbers.extent, numbers.rows, numbers.num_chunks)
    return Columns(
        **{**kept, "found": [*skeleton.found]}, header=header,
        pools={pool["name"]: pool["capacity"] for pool in header["pools"]},
        loops=dict(zip(skeleton.regions, loops, strict=True)), offset=numbers.offset, size=numbers.size,
        alias_offset=numbers.alias_offset, shape=numbers.shape,
    )  # fmt: skip


def _read_nested(op: _Named, buffer: _Named, barrier: _Named, edge: _Named, found: _Found) -> None:
    """Check the types and ranges of what lies inside the fields: id lists, operands, slices, gaps."""
    each = chain.from_iterable
    inplace, gaps, slices = list(each(op["inplace"])), list(each(buffer["gaps"])), list(each(op["slices"]))
    for label, entries, length, form in (
        ("ops.inplace", inplace, 2, "a pair"), ("buffers.gaps", gaps, 2, "a pair"),
        ("ops.slices", slices, 4, "[operand, axis, region, factor]"),
    ):  # fmt: skip
        if not (_LIST.issuperset(map(type, entries)) and {length}.issuperset(map(len, entries))):
            _fail(found, f"{label}: every entry must be {form}")
            return
    num_ops, ids = len(op["index"]), len(buffer["id"])
    listed = each(each(barrier[key] for key in ("inputs", "outputs", "carried")))
    _read_bounded(
        (
            ("ops.reads and ops.writes", [*each(op["reads"]), *each(op["writes"])], ids),
            ("ops.operands", list(each(map(dict.values, op["operands"]))), ids),
            ("ops.inplace", list(each(inplace)), ids),
            ("buffers.alias_of", list(filter(None, buffer["alias_of"])), ids),
            ("barriers", list(listed), ids),
            ("edges", [*edge["from"], *edge["to"]], num_ops),
            ("buffers.start and buffers.end", [*buffer["start"], *buffer["end"]], num_ops + 1),
            ("buffers.gaps", list(each(gaps)), num_ops + 1),
        ),
        found,
    )
    _read_slices(slices, found)
    _read_vocabulary(buffer, found)


def _read_bounded(bounded: Iterable[tuple[str, Sequence[Any], int | None]], found: _Found) -> None:
    for label, values, limit in bounded:
        if not _are_integers(values):
            _fail(found, f"{label}: expected integers")
        elif values and (min(values) < 0 or (limit is not None and max(values) >= limit)):
            below = "" if limit is None else f" and below {limit}"
            _fail(found, f"{label}: expected 0 or more{below}, got {min(values)} to {max(values)}")


def _read_slices(slices: Sequence[Sequence[Any]], found: _Found) -> None:
    if not slices:
        return
    operand, axis, name, factor = zip(*slices, strict=True)
    strings = TEXT.issuperset(map(type, operand)) and TEXT.issuperset(map(type, name))
    if not (strings and _are_integers(axis) and _are_integers(factor) and min(axis) >= 0 and min(factor) >= 1):
        _fail(found, "ops.slices: expected [operand, axis from 0, region, factor from 1]")


def _read_vocabulary(buffer: _Named, found: _Found) -> None:
    known: tuple[tuple[str, Collection[str]], ...] = (("kind", KINDS), ("dtype", ITEM_BYTES))
    for label, words in known:
        for value in sorted(set(buffer[label]).difference(words)):
            _fail(found, f"buffers.{label}: unknown {value!r}; known: {', '.join(sorted(words))}")
    for pool in sorted({*buffer["pool"]}):
        if not is_known_pool(pool):
            _fail(found, f"buffers.pool: unknown {pool!r}; known: {KNOWN_POOLS}")
    for label in ("alignment", "rotate"):
        if buffer[label] and min(buffer[label]) < 1:
            _fail(found, f"{label}: expected 1 or more, got {min(buffer[label])}")


def _read_settings(header: Mapping[str, Any], pool: _Named, found: _Found) -> None:
    """Check the types and ranges of what no table holds: dims, mesh, configuration, implementations, totals."""

    def require(holds: bool, message: str) -> None:
        if not holds:
            _fail(found, message)

    for key, value in header["dims"].items():
        require(type(value) is int and value >= 1, f"dims.{key}: expected an integer from 1, got {value!r}")
    mesh = header["mesh"]
    axes = mesh.get("axes")
    sizes = [mesh.get("size"), *(axes.values() if type(axes) is dict else [None])]
    mesh_holds = all(type(size) is int and size >= 1 for size in sizes)
    require(mesh_holds, f"mesh: expected a size and axes from 1, got {mesh!r}")
    _read_configs((header["config"],), found)
    claimed = header.get("batch_invariant", False)
    require(type(claimed) is bool, f"batch_invariant: expected a boolean, got {claimed!r}")
    card = header.get("capability", 0)
    require(type(card) is int and card >= 0, f"capability: expected an integer from 0, got {card!r}")
    names = header.get("declared", {"kernels": [], "streams": []})
    require(
        type(names) is dict and names.keys() == {"kernels", "streams"}
        and all(type(each) is list and all(type(name) is str for name in each) for each in names.values()),
        f"declared: expected lists of names, kernels and streams, got {names!r}",
    )  # fmt: skip
    for name in header["implementations"].values():
        require(type(name) is str, f"implementations: expected names, got {name!r}")
    _read_times("predicted_step_ms", (header["predicted_step_ms"],), found)
    components = header["components"]
    _read_bounded(
        (
            ("pools.capacity", pool["capacity"], None), ("components", list(components.values()), None),
            *((key, (header[key],), None) for key in (*_TOTALS, "max_ctx_tokens", "device_memory_bytes")),
        ),
        found,
    )  # fmt: skip
    require(
        components.keys() == set(COMPONENTS),
        f"components: expected {', '.join(COMPONENTS)}, got {', '.join(components)}",
    )
    require(header["page_bytes"] >= 1, f"page_bytes: expected 1 or more, got {header['page_bytes']}")
    require(header["backend"] in _BACKENDS, f"backend: unknown {header['backend']!r}")


def _read_configs(configs: Iterable[Mapping[str, Any]], found: _Found) -> None:
    for config in configs:
        if not _SETTING.issuperset(map(type, config.values())):
            _fail(found, f"config: expected rows, null or an option, got {config!r}")
        elif any(type(rows) is int and rows < 1 for rows in config.values()):
            _fail(found, f"config: expected rows from 1, got {config!r}")


def _read_times(label: str, times: Iterable[Any], found: _Found) -> None:
    for value in times:
        if not 0 <= value < inf:
            _fail(found, f"{label}: expected a finite time from 0, got {value!r}")


def _report_repeated(label: str, names: Sequence[str], found: _Found) -> None:
    if len(set(names)) != len(names):
        twice = sorted(name for name in set(names) if names.count(name) > 1)
        _fail(found, f"{label}: {', '.join(map(repr, twice))} more than once", "duplicate-name")


def _fail(found: _Found, message: str, code: str = "format") -> None:
    found.append(Violation(code=code, message=message))


def type_names(types: Collection[type]) -> str:
    """Return types as a message spells them.

    Examples
    --------
    >>> type_names({int, type(None)})
    'int or null'
    """
    return " or ".join(sorted("null" if t is NoneType else t.__name__ for t in types))
