"""Read a plan document into columns: fields and types, and nothing that one field says about another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from math import inf
from operator import itemgetter
from types import NoneType
from typing import Any, Final, NamedTuple

from mosaic.planner.check.columns import COMPONENTS, ITEM_BYTES, KINDS, POOLS, Barrier, Columns, Region, Violation

__all__ = ["BOOLEAN", "INTEGER", "NUMBER", "TEXT", "Types", "read", "type_names"]

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


class _Table(NamedTuple):
    """The fields of a list of JSON objects and the types that each may have."""

    label: str
    fields: Mapping[str, Types]

    def columns(self, rows: Sequence[Any], found: _Found) -> tuple[tuple[Any, ...], ...]:
        """Transpose rows into one tuple per field; empty tuple if some row is malformed."""
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
        sound = True
        for (name, allowed), column in zip(self.fields.items(), columns, strict=True):
            quick = _QUICK.get(allowed)
            if not (quick(column) if quick is not None else allowed.issuperset(map(type, column))):
                sound = False
                self._report_types(name, allowed, column, found)
        return columns if sound else ()

    def _report_missing(self, rows: Sequence[Any], found: _Found) -> None:
        for i, row in enumerate(rows):
            missing = [name for name in self.fields if name not in row]
            if missing:
                _fail(found, f"{self.label}[{i}]: missing {', '.join(missing)}")

    def _report_types(self, name: str, allowed: Types, column: Sequence[Any], found: _Found) -> None:
        for i, value in enumerate(column):
            if type(value) not in allowed:
                _fail(found, f"{self.label}[{i}].{name}: expected {type_names(allowed)}, got {value!r}")


_DOCUMENT: Final[Mapping[str, Types]] = {
    "mosaic_version": TEXT, "model": TEXT, "phase": TEXT, "dtype": TEXT, "dims": _MAP, "device": TEXT,
    "backend": TEXT, "estimated": BOOLEAN, "device_memory_bytes": INTEGER, "page_bytes": INTEGER, "mesh": _MAP,
    "implementations": _MAP, "pools": _LIST, "regions": _LIST, "barriers": _LIST, "edges": _LIST,
    "budget_bytes": INTEGER, "host_budget_bytes": INTEGER, "config": _MAP, "fits": BOOLEAN, "components": _MAP,
    "total_bytes": INTEGER, "host_bytes": INTEGER, "peak_bytes": INTEGER, "lower_bound_bytes": INTEGER,
    "optimal": BOOLEAN, "max_ctx_tokens": INTEGER, "predicted_step_ms": NUMBER, "formula": _LIST, "trace": _LIST,
    "solver": TEXT, "ops": _LIST, "buffers": _LIST,
}  # fmt: skip
_TOTALS: Final = (
    "budget_bytes", "host_budget_bytes", "total_bytes", "host_bytes", "peak_bytes", "lower_bound_bytes",
)  # fmt: skip
_POOL: Final = _Table("pools", {"name": TEXT, "device": TEXT, "capacity": INTEGER})
_REGION: Final = _Table("regions", {
    "name": TEXT, "knob": TEXT, "dim": TEXT, "extent": INTEGER, "rows": INTEGER, "count": INTEGER, "start": INTEGER,
    "end": INTEGER, "parent": _STR_OR_NULL,
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
    "writes": _LIST, "flops": INTEGER, "bytes": INTEGER, "operands": _MAP, "attrs": _MAP, "inplace": _LIST,
    "slices": _LIST,
})  # fmt: skip
_BUFFER: Final = _Table("buffers", {
    "id": INTEGER, "name": TEXT, "kind": TEXT, "pool": TEXT, "offset": INTEGER, "size": INTEGER, "start": INTEGER,
    "end": INTEGER, "gaps": _LIST, "alias_of": _INT_OR_NULL, "alias_offset": INTEGER, "dtype": TEXT, "shape": _LIST,
    "alignment": INTEGER, "region": _STR_OR_NULL, "tensor": _STR_OR_NULL, "rotate": INTEGER,
})  # fmt: skip

_Named = Mapping[str, tuple[Any, ...]]  # field -> column


def read(document: Mapping[str, Any], found: list[Violation]) -> Columns | None:
    """Transpose a document into columns; None if a field is missing or of a wrong type."""
    for key, allowed in _DOCUMENT.items():
        if key not in document:
            _fail(found, f"missing {key}")
        elif type(document[key]) not in allowed:
            _fail(found, f"{key}: expected {type_names(allowed)}, got {type(document[key]).__name__}")
    if found:
        return None
    pool, region, barrier, edge, op, buffer, _, step = (
        dict(zip(table.fields, table.columns(document[table.label], found), strict=False))
        for table in (_POOL, _REGION, _BARRIER, _EDGE, _OP, _BUFFER, _FORM, _STEP)
    )
    if found:
        return None
    _read_settings(document, pool, step, found)
    _read_attributes(op["attrs"], found)
    for label, numbers in (("ops[i].index must be i", op["index"]), ("buffers[i].id must be i", buffer["id"])):
        if numbers != tuple(range(len(numbers))):
            _fail(found, label, "id")
    _read_nested(document, op, buffer, barrier, edge, found)
    if found:
        return None
    for label, names in (("ops", op), ("buffers", buffer), ("pools", pool), ("regions", region)):
        _report_repeated(label, names["name"], found)
    return _columns(document, pool, region, barrier, edge, op, buffer, found)


def _columns(
    document: Mapping[str, Any], pool: _Named, region: _Named, barrier: _Named, edge: _Named, op: _Named,
    buffer: _Named, found: _Found,
) -> Columns:  # fmt: skip
    loops = map(Region._make, zip(*region.values(), strict=True))
    return Columns(
        document=document, found=found, pools=dict(zip(pool["name"], pool["capacity"], strict=True)),
        regions=dict(zip(region["name"], loops, strict=True)),
        barriers=list(map(Barrier._make, zip(*barrier.values(), strict=True))),
        edges=list(zip(*edge.values(), strict=True)),
        op_name=op["name"], kernel=op["kernel"], stream=op["stream"], op_region=op["region"], reads=op["reads"],
        writes=op["writes"], flops=op["flops"], moved=op["bytes"], operands=op["operands"], attrs=op["attrs"],
        inplace=op["inplace"], slices=op["slices"],
        name=buffer["name"], kind=buffer["kind"], pool=buffer["pool"], offset=buffer["offset"], size=buffer["size"],
        claimed_start=buffer["start"], claimed_end=buffer["end"], gaps=buffer["gaps"], alias_of=buffer["alias_of"],
        alias_offset=buffer["alias_offset"], dtype=buffer["dtype"], shape=buffer["shape"],
        alignment=buffer["alignment"], home=buffer["region"], tensor=buffer["tensor"], rotate=buffer["rotate"],
    )  # fmt: skip


def _read_nested(
    document: Mapping[str, Any], op: _Named, buffer: _Named, barrier: _Named, edge: _Named, found: _Found
) -> None:
    """Check the types and ranges of what lies inside the fields: id lists, operands, slices, gaps, shapes."""
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
            ("buffers.gaps", list(each(gaps)), num_ops + 1),
            ("buffers.shape", list(each(buffer["shape"])), None),
            ("buffers.offset", buffer["offset"], None),
            ("buffers.size", buffer["size"], None),
            ("ops.flops", op["flops"], None),
            ("ops.bytes", op["bytes"], None),
            ("components", list(document["components"].values()), None),
            ("totals", [document[key] for key in _TOTALS], None),
        ),
        found,
    )
    _read_slices(slices, found)
    _read_vocabulary(document, buffer, found)


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


def _read_vocabulary(document: Mapping[str, Any], buffer: _Named, found: _Found) -> None:
    known: tuple[tuple[str, Collection[str]], ...] = (("kind", KINDS), ("pool", POOLS), ("dtype", ITEM_BYTES))
    for label, words in known:
        for value in sorted(set(buffer[label]).difference(words)):
            _fail(found, f"buffers.{label}: unknown {value!r}; known: {', '.join(sorted(words))}")
    for label, values in (
        ("alignment", buffer["alignment"]), ("rotate", buffer["rotate"]), ("page_bytes", (document["page_bytes"],)),
    ):  # fmt: skip
        if values and min(values) < 1:
            _fail(found, f"{label}: expected 1 or more, got {min(values)}")
    components = document["components"]
    if components.keys() != set(COMPONENTS):
        _fail(found, f"components: expected {', '.join(COMPONENTS)}, got {', '.join(components)}")


def _read_attributes(attrs: Sequence[dict[str, Any]], found: _Found) -> None:
    if not _PLAIN.issuperset(map(type, chain.from_iterable(map(dict.values, attrs)))):
        _fail(found, "ops.attrs: expected numbers, strings and booleans")


def _read_settings(document: Mapping[str, Any], pool: _Named, step: _Named, found: _Found) -> None:
    """Check the types and ranges of what no table holds: dims, mesh, configurations, implementations, times."""

    def require(holds: bool, message: str) -> None:
        if not holds:
            _fail(found, message)

    for key, value in document["dims"].items():
        require(type(value) is int and value >= 1, f"dims.{key}: expected an integer from 1, got {value!r}")
    mesh = document["mesh"]
    axes = mesh.get("axes")
    sizes = [mesh.get("size"), *(axes.values() if type(axes) is dict else [None])]
    mesh_holds = all(type(size) is int and size >= 1 for size in sizes)
    require(mesh_holds, f"mesh: expected a size and axes from 1, got {mesh!r}")
    for config in (document["config"], *step["config"]):
        if not _SETTING.issuperset(map(type, config.values())):
            require(False, f"config: expected rows, null or an option, got {config!r}")
        elif min((rows for rows in config.values() if type(rows) is int), default=1) < 1:
            require(False, f"config: expected rows from 1, got {config!r}")
    for name in document["implementations"].values():
        require(type(name) is str, f"implementations: expected names, got {name!r}")
    for label, times in (
        ("predicted_step_ms", (document["predicted_step_ms"],)), ("trace.predicted_ms", step["predicted_ms"]),
    ):  # fmt: skip
        for value in times:
            require(0 <= value < inf, f"{label}: expected a finite time from 0, got {value!r}")
    for label, counts in (
        ("pools.capacity", pool["capacity"]), ("trace.peak_bytes", step["peak_bytes"]),
        ("trace.total_bytes", step["total_bytes"]), ("max_ctx_tokens", (document["max_ctx_tokens"],)),
        ("device_memory_bytes", (document["device_memory_bytes"],)),
    ):  # fmt: skip
        require(min(counts, default=0) >= 0, f"{label}: expected 0 or more, got {min(counts, default=0)}")
    require(document["backend"] in _BACKENDS, f"backend: unknown {document['backend']!r}")


def _report_repeated(label: str, names: Sequence[str], found: _Found) -> None:
    if len(set(names)) != len(names):
        twice = sorted(name for name in set(names) if names.count(name) > 1)
        _fail(found, f"{label}: {', '.join(map(repr, twice))} more than once", "duplicate-name")


def _fail(found: _Found, message: str, code: str = "format") -> None:
    found.append(Violation(code=code, message=message))


def type_names(types: Collection[type]) -> str:
    """Types as a message spells them.

    Examples
    --------
    >>> type_names({int, type(None)})
    'int or null'
    """
    return " or ".join(sorted("null" if t is NoneType else t.__name__ for t in types))
