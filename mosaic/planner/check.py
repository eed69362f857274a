"""Verify every claim of a plan from its JSON document alone, sharing no code with the planner.

Lifetimes are derived again from the ops. Addresses are swept upwards with one bit set of op indices per buffer, where
packers sweep time with sets of addresses. O(n log n) in buffers, times N / 64 words for the bit sets of N ops.

Rulings where the rules leave a choice; each takes the safe side:

- A `carry` that is read before it is written holds its value from op 0; one that is written lives to the end. A `host`
  buffer that is read before it is written is a constant and lives throughout. An `input` that no op touches lives one
  op, `[0, 1)`.
- A buffer is touched only inside its home region. One that is carried through it may be read before it is written (the
  kernel knows the first iteration), but some op must write it; it is carried through all enclosing regions as well.
- A gap holds no access and no part of an explicit barrier or of a side stream's window. What comes first after it, also
  on the way round a loop, overwrites the whole buffer. Lower bound and overlap leave gaps out; a root's gaps bind its
  aliases.
- `inplace` permits only an overwrite at the same address and of the same number of bytes. Members of an alias group
  that share bytes must hold their value when read, in each iteration of a loop; what the step hands on, at its end.
- A side op of a loop is forked and joined inside that loop. One that is never joined touches nothing in the workspace.
- Reads and writes of one value on two streams are ordered by edges, too, and `rotate` exempts nothing from that.
- The shape of a buffer that rotates is one slot's; its size is that of all slots, each rounded up to the alignment.
- `operands` names each buffer of `reads` and `writes`, scratch included (scratch is written).
- Explicit barriers that stretch nothing are allowed: they promise more and break nothing.
- Shapes, attributes, FLOPs and bytes of the shipped operators follow from the table of letters below; kernels that are
  not in it are their author's word. Inside a loop an axis is either a sliced multiple of the loop's rows or constant.
- Each line of the formula is compared with what is live at its op: the sum before rounding, so at most that, and at
  least that less what rounding (and in an alias group the storage beyond the smallest member) adds. The largest line
  reaches the lower bound up to the same slack.
- In the phase `full_step`, which Mosaic ships, each dim must be the length of an input; elsewhere dims are free.
- A JSON `true` where an integer belongs counts as 1.

What no file can prove alone: predicted times; the bytes of the device's context and libraries, its memory and other
figures; the budget; that `max_ctx_tokens` is not higher (and for several sequences, or where the plan does not fit,
anything about it); settings of knobs that are off and options of choices; search steps under other choices; scratch
sizes, `eps` and `scale`; names of models, ops, buffers and checkpoint tensors; that the graph is the model's, for a
renamed kernel is an unknown one. These are checked for form, and against each other where they repeat themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise, repeat
from math import inf, prod
from operator import add, itemgetter, mod, mul
from types import NoneType
from typing import Any, Final, NamedTuple

from mosaic.errors import CheckFailed, PlanFormatError

__all__ = ["SCHEMA", "Violation", "check_plan", "require_valid", "require_well_formed"]

SCHEMA: Final = "mosaic.plan/1"

_MAIN: Final = "main"
_PAGED: Final = ("workspace", "weights", "state")  # pools that the plan places page by page
_UNIT_BYTES: Final = 512  # every root of a paged pool starts and ends on it
_FROM_START: Final = frozenset({"input", "weight", "state", "external"})  # these hold a value before op 0
_TO_END: Final = frozenset({"output", "weight", "state", "external"})  # these hold a value after the last op
_KINDS: Final = _FROM_START | _TO_END | {"carry", "transient", "scratch", "host"}
_POOLS: Final = frozenset({*_PAGED, "host", "external"})
_COMPONENTS: Final = ("context", "library", "weights", "state", "workspace")
_BACKENDS: Final = frozenset({"cuda", "cpu"})
_MAX_DIGITS: Final = 40  # of a number in a formula
_POWERS: Final = frozenset("123456789")  # of a dim in a formula
_FULL_STEP: Final = "full_step"  # the phase whose dims are known by name
_STEP_DIMS: Final = ("tokens", "seqs", "pairs", "masked")
_ITEM_BYTES: Final = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "float32": 4, "int64": 8, "float64": 8,
}  # fmt: skip

_Types = frozenset[type]
_INT: Final[_Types] = frozenset({int})
_STR: Final[_Types] = frozenset({str})
_BOOL: Final[_Types] = frozenset({bool})
_MAP: Final[_Types] = frozenset({dict})
_LIST: Final[_Types] = frozenset({list, tuple})
_NUMBER: Final[_Types] = frozenset({int, float})
_INT_OR_NULL: Final[_Types] = frozenset({int, NoneType})
_STR_OR_NULL: Final[_Types] = frozenset({str, NoneType})
_SETTING: Final[_Types] = frozenset({int, str, NoneType})  # of a configuration: rows, off, an option
_PLAIN: Final[_Types] = frozenset({int, float, str, bool})  # of an attribute


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One claim of a plan that does not hold.

    Parameters
    ----------
    code
        Short reason code: 'overlap', 'lifetime-short', 'barrier-missing', …
    message
        What was claimed and what was found, with names and numbers.
    buffers, ops
        Ids of the buffers and indices of the ops concerned.

    Examples
    --------
    >>> str(Violation(code="peak", message="peak_bytes is 512, buffers reach 1024"))
    'peak: peak_bytes is 512, buffers reach 1024'
    """

    code: str
    message: str
    buffers: tuple[int, ...] = ()
    ops: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


def check_plan(document: Mapping[str, Any]) -> list[Violation]:
    """List the claims of a plan that do not hold; an empty list is a valid plan.

    Parameters
    ----------
    document
        A plan as its JSON reads, schema 'mosaic.plan/1'. It is not written.

    Returns
    -------
    list of Violation
        In a fixed order. A malformed document yields only 'format', 'id' and 'region' violations: nothing can be
        derived from it.

    Raises
    ------
    PlanFormatError
        If the document is no plan or of another schema.

    Examples
    --------
    >>> [violation.code for violation in check_plan({"schema": "mosaic.plan/1"})][:2]
    ['format', 'format']
    """
    _refuse_other_schemas(document)
    found: list[Violation] = []
    plan = _read(document, found)
    if plan is None or not _check_structure(plan):
        return found
    _check_ops(plan)
    _check_launches(plan)
    _derive_lifetimes(plan)
    _check_sizes(plan)
    _check_placement(plan)
    _check_aliases(plan)
    gaps = _checked_gaps(plan)
    _check_addresses(plan, gaps)
    _check_claims(plan, gaps)
    return found


def require_valid(document: Mapping[str, Any]) -> None:
    """Raise if any claim of a plan does not hold.

    Raises
    ------
    CheckFailed
        With every violation's text.
    PlanFormatError
        If the document is no plan or of another schema.

    Examples
    --------
    >>> require_valid({"schema": "mosaic.plan/2"})
    Traceback (most recent call last):
        ...
    mosaic.errors.PlanFormatError: expected schema 'mosaic.plan/1', got 'mosaic.plan/2'; plan again with this version
    """
    violations = check_plan(document)
    if violations:
        raise CheckFailed(map(str, violations))


def require_well_formed(document: Mapping[str, Any]) -> None:
    """Raise if a document cannot be read as a plan; whether its claims hold is left to `check_plan`.

    Raises
    ------
    PlanFormatError
        If the document is of another schema, or a field is missing, of a wrong type or out of range.

    Examples
    --------
    >>> require_well_formed({"schema": "mosaic.plan/1"})
    Traceback (most recent call last):
        ...
    mosaic.errors.PlanFormatError: not a plan: missing mosaic_version (and 29 more)
    """
    _refuse_other_schemas(document)
    found: list[Violation] = []
    if _read(document, found) is None:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise PlanFormatError(f"not a plan: {found[0].message}{more}")


def _refuse_other_schemas(document: Mapping[str, Any]) -> None:
    schema = document.get("schema") if isinstance(document, Mapping) else None
    if schema != SCHEMA:
        raise PlanFormatError(f"expected schema '{SCHEMA}', got {schema!r}; plan again with this version")


# Reading: fields and types, column by column, as looping over 500 rows of 17 fields would take half of the time.


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


_QUICK: Final[Mapping[_Types, Callable[[Sequence[Any]], bool]]] = {_STR: _are_strings, _INT: _are_integers}


class _Table(NamedTuple):
    """The fields of a list of JSON objects and the types that each may have."""

    label: str
    fields: Mapping[str, _Types]

    def columns(self, rows: Sequence[Any], found: list[Violation]) -> tuple[tuple[Any, ...], ...]:
        """Transpose rows into one tuple per field; empty tuple if some row is malformed."""
        if not _MAP.issuperset(map(type, rows)):
            _fail(found, "format", f"{self.label}: every entry must be an object")
            return ()
        if not rows:
            return ((),) * len(self.fields)
        try:
            columns = tuple(zip(*map(itemgetter(*self.fields), rows), strict=True))
        except KeyError:
            for i, row in enumerate(rows):
                missing = [name for name in self.fields if name not in row]
                if missing:
                    _fail(found, "format", f"{self.label}[{i}]: missing {', '.join(missing)}")
            return ()
        bad = False
        for (name, allowed), column in zip(self.fields.items(), columns, strict=True):
            quick = _QUICK.get(allowed)
            if not (quick(column) if quick is not None else allowed.issuperset(map(type, column))):
                bad = True
                for i, value in enumerate(column):
                    if type(value) not in allowed:
                        _fail(
                            found, "format", f"{self.label}[{i}].{name}: expected {_type_names(allowed)}, got {value!r}"
                        )
        return () if bad else columns


_DOCUMENT: Final[Mapping[str, _Types]] = {
    "mosaic_version": _STR, "model": _STR, "phase": _STR, "dtype": _STR, "dims": _MAP, "device": _STR,
    "backend": _STR, "estimated": _BOOL, "device_memory_bytes": _INT, "page_bytes": _INT, "mesh": _MAP, "pools": _LIST,
    "regions": _LIST, "barriers": _LIST, "edges": _LIST, "budget_bytes": _INT, "config": _MAP, "fits": _BOOL,
    "components": _MAP, "total_bytes": _INT,
    "peak_bytes": _INT, "lower_bound_bytes": _INT, "optimal": _BOOL, "max_ctx_tokens": _INT,
    "predicted_step_ms": _NUMBER, "formula": _LIST, "trace": _LIST, "solver": _STR, "ops": _LIST, "buffers": _LIST,
}  # fmt: skip
_POOL: Final = _Table("pools", {"name": _STR, "device": _STR, "capacity": _INT})
_REGION: Final = _Table("regions", {
    "name": _STR, "knob": _STR, "dim": _STR, "extent": _INT, "rows": _INT, "count": _INT, "start": _INT, "end": _INT,
    "parent": _STR_OR_NULL,
})  # fmt: skip
_BARRIER: Final = _Table("barriers", {
    "name": _STR, "region": _STR_OR_NULL, "start": _INT, "end": _INT, "inputs": _LIST, "outputs": _LIST,
    "carried": _LIST,
})  # fmt: skip
_FORM: Final = _Table("formula", {"expr": _STR, "at": _STR})
_STEP: Final = _Table("trace", {
    "config": _MAP, "move": _STR, "bottleneck": _STR, "peak_bytes": _INT, "total_bytes": _INT, "predicted_ms": _NUMBER,
})  # fmt: skip
_EDGE: Final = _Table("edges", {"kind": _STR, "from": _INT, "to": _INT})
_OP: Final = _Table("ops", {
    "index": _INT, "name": _STR, "kernel": _STR, "stream": _STR, "region": _STR_OR_NULL, "reads": _LIST,
    "writes": _LIST, "flops": _INT, "bytes": _INT, "operands": _MAP, "attrs": _MAP, "inplace": _LIST, "slices": _LIST,
})  # fmt: skip
_BUFFER: Final = _Table("buffers", {
    "id": _INT, "name": _STR, "kind": _STR, "pool": _STR, "offset": _INT, "size": _INT, "start": _INT, "end": _INT,
    "gaps": _LIST, "alias_of": _INT_OR_NULL, "alias_offset": _INT, "dtype": _STR, "shape": _LIST, "alignment": _INT,
    "region": _STR_OR_NULL, "tensor": _STR_OR_NULL, "rotate": _INT,
})  # fmt: skip

_OPERAND_AND_AXIS: Final = itemgetter(0, 1)  # of an entry of `slices`

_Ids = Sequence[int]


class _Region(NamedTuple):
    name: str
    knob: str
    dim: str
    extent: int
    rows: int
    num_chunks: int
    start: int
    end: int
    parent: str | None


class _Barrier(NamedTuple):
    name: str
    region: str | None
    start: int
    end: int
    inputs: _Ids
    outputs: _Ids
    carried: _Ids


@dataclass(slots=True, kw_only=True)
class _Plan:
    """A plan by columns, indexed by buffer id or op index, and what the checks derive from it."""

    document: Mapping[str, Any]
    found: list[Violation]
    pools: Mapping[str, int]
    regions: Mapping[str, _Region]
    barriers: Sequence[_Barrier]
    edges: Sequence[tuple[str, int, int]]
    # ops
    op_name: Sequence[str]
    kernel: Sequence[str]
    stream: Sequence[str]
    op_region: Sequence[str | None]
    reads: Sequence[_Ids]
    writes: Sequence[_Ids]
    flops: Sequence[int]
    moved: Sequence[int]
    operands: Sequence[dict[str, int]]
    attrs: Sequence[dict[str, Any]]
    inplace: Sequence[Sequence[Sequence[int]]]
    slices: Sequence[Sequence[tuple[str, int, str, int]]]
    # buffers
    name: Sequence[str]
    kind: Sequence[str]
    pool: Sequence[str]
    offset: Sequence[int]
    size: Sequence[int]
    claimed_start: Sequence[int]
    claimed_end: Sequence[int]
    gaps: Sequence[Sequence[Sequence[int]]]
    alias_of: Sequence[int | None]
    alias_offset: Sequence[int]
    dtype: Sequence[str]
    shape: Sequence[Sequence[int]]
    alignment: Sequence[int]
    home: Sequence[str | None]
    rotate: Sequence[int]
    # derived
    enclosing: dict[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # region -> itself and those around it, innermost first
    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    windows: dict[int, list[tuple[int, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )  # held by barriers, side streams
    members: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # root -> its aliases
    own: dict[int, tuple[int, int]] = field(default_factory=dict)  # root with aliases -> the lifetime of its own value
    top: list[int] = field(default_factory=list)  # buffer -> offset + size
    roots: dict[str, list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )  # pool -> buffers that are no aliases
    reach: dict[str, int] = field(default_factory=dict)  # pool -> end of its highest buffer
    raw_bytes: list[int] = field(default_factory=list)  # buffer -> product(shape) x itemsize x slots

    @property
    def has_side_streams(self) -> bool:
        """Whether any op runs beside the main stream."""
        return not {_MAIN}.issuperset(self.stream)

    def fail(self, code: str, message: str, buffers: Iterable[int] = (), ops: Iterable[int] = ()) -> None:
        """Record a violation."""
        _fail(self.found, code, message, buffers, ops)

    def say(self, b: int) -> str:
        """Name a buffer for a message."""
        return f"buffer {b} '{self.name[b]}'"

    def say_op(self, i: int) -> str:
        """Name an op for a message."""
        return f"op {i} '{self.op_name[i]}'"

    def is_within(self, home: str | None, region: str) -> bool:
        """Whether a home is the region or nested in it."""
        return home is not None and region in self.enclosing[home]

    def group(self, root: int) -> list[int]:
        """A root and its aliases."""
        return [root, *self.members.get(root, ())]

    def share_bytes(self, a: int, b: int) -> bool:
        """Whether two members of one alias group overlap in bytes."""
        return (
            self.alias_offset[a] < self.alias_offset[b] + self.size[b]
            and self.alias_offset[b] < self.alias_offset[a] + self.size[a]
        )


def _fail(
    found: list[Violation], code: str, message: str, buffers: Iterable[int] = (), ops: Iterable[int] = ()
) -> None:
    found.append(Violation(code=code, message=message, buffers=tuple(buffers), ops=tuple(ops)))


def _type_names(types: Collection[type]) -> str:
    return " or ".join(sorted("null" if t is NoneType else t.__name__ for t in types))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _read(document: Mapping[str, Any], found: list[Violation]) -> _Plan | None:
    """Transpose a document into columns; None if a field is missing or of a wrong type."""
    for key, allowed in _DOCUMENT.items():
        if key not in document:
            _fail(found, "format", f"missing {key}")
        elif type(document[key]) not in allowed:
            _fail(found, "format", f"{key}: expected {_type_names(allowed)}, got {type(document[key]).__name__}")
    if found:
        return None
    pool, region, barrier = (t.columns(document[t.label], found) for t in (_POOL, _REGION, _BARRIER))
    edge, op, buffer = (t.columns(document[t.label], found) for t in (_EDGE, _OP, _BUFFER))
    _, step = (t.columns(document[t.label], found) for t in (_FORM, _STEP))
    if found:
        return None
    _read_settings(document, pool, op[10], step, found)
    index, op_name, kernel, stream, op_region, reads, writes, flops, moved, operands, attrs, inplace, slices = op
    (
        ids,
        name,
        kind,
        pool_of,
        offset,
        size,
        start,
        end,
        gaps,
        alias_of,
        alias_offset,
        dtype,
        shape,
        alignment,
        home,
        _,
        rotate,
    ) = buffer
    num_ops, num_buffers = len(index), len(ids)
    if index != tuple(range(num_ops)):
        _fail(found, "id", "ops[i].index must be i")
    if ids != tuple(range(num_buffers)):
        _fail(found, "id", "buffers[i].id must be i")
    _read_nested(document, op, buffer, barrier, edge, found)
    if found:
        return None
    for label, names in (("ops", op_name), ("buffers", name), ("pools", pool[0]), ("regions", region[0])):
        if len(set(names)) != len(names):
            twice = sorted(name for name in set(names) if names.count(name) > 1)
            _fail(found, "duplicate-name", f"{label}: {', '.join(map(repr, twice))} more than once")
    return _Plan(
        document=document, found=found, pools=dict(zip(pool[0], pool[2], strict=True)),
        regions=dict(zip(region[0], map(_Region._make, zip(*region, strict=True)), strict=True)),
        barriers=list(map(_Barrier._make, zip(*barrier, strict=True))), edges=list(zip(*edge, strict=True)),
        op_name=op_name, kernel=kernel, stream=stream, op_region=op_region, reads=reads, writes=writes, flops=flops,
        moved=moved, operands=operands, attrs=attrs, inplace=inplace, slices=slices, name=name,
        kind=kind, pool=pool_of, offset=offset, size=size,
        claimed_start=start, claimed_end=end, gaps=gaps, alias_of=alias_of, alias_offset=alias_offset, dtype=dtype,
        shape=shape, alignment=alignment, home=home, rotate=rotate,
    )  # fmt: skip


def _read_nested(
    document: Mapping[str, Any],
    op: Sequence[Any],
    buffer: Sequence[Any],
    barrier: Sequence[Any],
    edge: Sequence[Any],
    found: list[Violation],
) -> None:
    """Check the types and ranges of what lies inside the fields: id lists, operands, slices, gaps, shapes."""
    num_ops, num_buffers = len(op[0]), len(buffer[0])
    each = chain.from_iterable
    inplace, gaps = list(each(op[11])), list(each(buffer[8]))
    for label, entries in (("ops.inplace", inplace), ("buffers.gaps", gaps)):
        if not (_LIST.issuperset(map(type, entries)) and {2}.issuperset(map(len, entries))):
            _fail(found, "format", f"{label}: every entry must be a pair")
            return
    slices = list(each(op[12]))
    if not (_LIST.issuperset(map(type, slices)) and {4}.issuperset(map(len, slices))):
        _fail(found, "format", "ops.slices: every entry must be [operand, axis, region, factor]")
        return
    ids = num_buffers
    bounded = (
        ("ops.reads and ops.writes", [*each(op[5]), *each(op[6])], ids),
        ("ops.operands", list(each(map(dict.values, op[9]))), ids),
        ("ops.inplace", list(each(inplace)), ids),
        ("buffers.alias_of", list(filter(None, buffer[9])), ids),
        ("barriers", list(each(each(barrier[4:]))), ids),
        ("edges", [*edge[1], *edge[2]], num_ops),
        ("buffers.gaps", list(each(gaps)), num_ops + 1),
        ("buffers.shape", list(each(buffer[12])), None),
        ("buffers.offset", buffer[4], None),
        ("buffers.size", buffer[5], None),
        ("ops.flops", op[7], None),
        ("ops.bytes", op[8], None),
        ("components", list(document["components"].values()), None),
        ("totals", [document[key] for key in ("budget_bytes", "total_bytes", "peak_bytes", "lower_bound_bytes")], None),
    )
    for label, values, limit in bounded:
        if not _are_integers(values):
            _fail(found, "format", f"{label}: expected integers")
        elif values and (min(values) < 0 or (limit is not None and max(values) >= limit)):
            below = "" if limit is None else f" and below {limit}"
            _fail(found, "format", f"{label}: expected 0 or more{below}, got {min(values)} to {max(values)}")
    if slices:
        operand, axis, name, factor = zip(*slices, strict=True)
        strings = _STR.issuperset(map(type, operand)) and _STR.issuperset(map(type, name))
        if not (strings and _are_integers(axis) and _are_integers(factor) and min(axis) >= 0 and min(factor) >= 1):
            _fail(found, "format", "ops.slices: expected [operand, axis from 0, region, factor from 1]")
    vocabulary = (("kind", buffer[2], _KINDS), ("pool", buffer[3], _POOLS), ("dtype", buffer[11], _ITEM_BYTES))
    for label, values, known in vocabulary:
        for value in sorted(set(values).difference(known)):
            _fail(found, "format", f"buffers.{label}: unknown {value!r}; known: {', '.join(sorted(known))}")
    for label, values in (("alignment", buffer[13]), ("rotate", buffer[16]), ("page_bytes", (document["page_bytes"],))):
        if values and min(values) < 1:
            _fail(found, "format", f"{label}: expected 1 or more, got {min(values)}")
    if document["components"].keys() != set(_COMPONENTS):
        _fail(
            found, "format", f"components: expected {', '.join(_COMPONENTS)}, got {', '.join(document['components'])}"
        )


def _read_settings(
    document: Mapping[str, Any], pool: Sequence[Any], attrs: Sequence[Any], step: Sequence[Any], found: list[Violation]
) -> None:
    """Check the types and ranges of what no table holds: dims, mesh, configurations, attributes, times."""

    def require(holds: bool, message: str) -> None:
        if not holds:
            _fail(found, "format", message)

    dims, mesh = document["dims"], document["mesh"]
    for key, value in dims.items():
        require(type(value) is int and value >= 1, f"dims.{key}: expected an integer from 1, got {value!r}")
    axes = mesh.get("axes")
    sizes = [mesh.get("size"), *(axes.values() if type(axes) is dict else [None])]
    require(
        all(type(size) is int and size >= 1 for size in sizes), f"mesh: expected a size and axes from 1, got {mesh!r}"
    )
    for config in (document["config"], *step[0]):
        if not _SETTING.issuperset(map(type, config.values())):
            require(False, f"config: expected rows, null or an option, got {config!r}")
        elif min((rows for rows in config.values() if type(rows) is int), default=1) < 1:
            require(False, f"config: expected rows from 1, got {config!r}")
    if not _PLAIN.issuperset(map(type, chain.from_iterable(map(dict.values, attrs)))):
        require(False, "ops.attrs: expected numbers, strings and booleans")
    for label, times in (("predicted_step_ms", (document["predicted_step_ms"],)), ("trace.predicted_ms", step[5])):
        for value in times:
            require(0 <= value < inf, f"{label}: expected a finite time from 0, got {value!r}")
    for label, counts in (
        ("pools.capacity", pool[2]), ("trace.peak_bytes", step[3]), ("trace.total_bytes", step[4]),
        ("max_ctx_tokens", (document["max_ctx_tokens"],)),
        ("device_memory_bytes", (document["device_memory_bytes"],)),
    ):  # fmt: skip
        require(min(counts, default=0) >= 0, f"{label}: expected 0 or more, got {min(counts, default=0)}")
    require(document["backend"] in _BACKENDS, f"backend: unknown {document['backend']!r}")


# Structure: regions, and everything that refers to them.


def _check_structure(plan: _Plan) -> bool:
    """Check the region tree and each op's and buffer's place in it; False if later checks could not rely on it."""
    if not _link_regions(plan):
        return False
    expected: list[str | None] = [None] * len(plan.op_name)
    for region in sorted(plan.regions.values(), key=lambda r: len(plan.enclosing[r.name])):
        expected[region.start : region.end] = [region.name] * (region.end - region.start)
    sound = True
    if list(plan.op_region) != expected:
        for i, (claimed, derived) in enumerate(zip(plan.op_region, expected, strict=True)):
            if claimed == derived:
                continue
            sound = False
            plan.fail("region", f"{plan.say_op(i)} claims region {claimed!r}, the intervals say {derived!r}", (), (i,))
    for home in sorted({at for at in plan.home if at is not None}.difference(plan.regions)):
        sound = False
        owners = [b for b, name in enumerate(plan.home) if name == home]
        plan.fail("region", f"{plan.say(owners[0])} has its home in unknown region {home!r}", owners)
    for barrier in plan.barriers:
        if not 0 <= barrier.start < barrier.end <= len(plan.op_name):
            sound = False
            plan.fail("barrier-mismatch", f"barrier '{barrier.name}' covers no op: [{barrier.start}, {barrier.end})")
    return sound


def _link_regions(plan: _Plan) -> bool:
    """Check each region alone and the nesting of all; fill `enclosing`."""
    before = len(plan.found)
    siblings: dict[str | None, list[_Region]] = defaultdict(list)
    for region in plan.regions.values():
        where = f"region '{region.name}'"
        if not 0 <= region.start < region.end <= len(plan.op_name):
            plan.fail("region", f"{where} covers no op: [{region.start}, {region.end}) of {len(plan.op_name)}")
        if region.rows < 1 or region.extent < 1 or region.num_chunks != -(-region.extent // region.rows):
            plan.fail(
                "region",
                f"{where}: {region.num_chunks} chunks of {region.rows} rows do not cover {region.extent} exactly",
            )
        siblings[region.parent].append(region)
        parent = None if region.parent is None else plan.regions.get(region.parent)
        if region.parent is not None and (
            parent is None or not parent.start <= region.start < region.end <= parent.end
        ):
            plan.fail("region", f"{where} does not lie inside its parent {region.parent!r}")
    for family in siblings.values():
        family.sort(key=lambda r: r.start)
        for left, right in pairwise(family):
            if right.start < left.end:
                plan.fail(
                    "region", f"regions '{left.name}' and '{right.name}' overlap and neither is the other's parent"
                )
    for name in plan.regions:
        names: list[str] = []
        at: str | None = name
        while at is not None and at in plan.regions and at not in names:
            names.append(at)
            at = plan.regions[at].parent
        if at is not None:
            plan.fail("region", f"region '{name}': its parents never end")
        plan.enclosing[name] = tuple(names)
    return len(plan.found) == before


def _check_launches(plan: _Plan) -> None:
    """Check slices, and what the operators say of shapes, attributes, FLOPs and bytes; once per distinct launch.

    Layers repeat their launches: what differs between two of them are names and buffer ids.
    """
    ops = range(len(plan.op_name))
    seen: dict[tuple[Any, ...], int] = {}
    alike = list(map(seen.setdefault, _launches(plan), ops))  # op -> the first op of the same launch
    unsound: set[int] = set()
    sides: dict[int, Callable[[Mapping[str, int]], Any] | None] = {}
    for i in seen.values():
        before = len(plan.found)
        names = _check_operator(plan, i) if _check_slices(plan, i) else None
        sides[i] = itemgetter(*names[0], *names[1]) if names is not None else None
        if len(plan.found) > before:
            unsound.add(i)
    for i, first, operands, reads, writes in zip(ops, alike, plan.operands, plan.reads, plan.writes, strict=True):
        named = sides[first]
        if named is None:
            if {*reads, *writes} != {*operands.values()}:
                _report_operands(plan, i, operands.values(), "")
        elif named(operands) != (*reads, *writes):
            _check_sides(plan, i)
    for i in ops if unsound else ():
        if alike[i] in unsound and alike[i] != i and _check_slices(plan, i):
            _check_operator(plan, i)


def _launches(plan: _Plan) -> Iterator[tuple[Any, ...]]:
    """What makes two launches the same: kernel, work, operands' names, shapes and slices, loops, attributes."""
    loops, depths = _number_loops(plan)
    numbers: dict[Any, int] = {}
    homes = map(loops.__getitem__, plan.home) if plan.regions else repeat(-1)
    specs = zip(map(tuple, plan.shape), plan.dtype, plan.rotate, homes, strict=False)
    spec = [numbers.setdefault(value, k) for k, value in enumerate(specs)]
    cuts: list[Any] = [()] * len(plan.slices)
    for i, slices in enumerate(plan.slices):
        if slices:
            cut: list[Any] = [*chain.from_iterable(slices)]
            depth = depths[plan.op_region[i]]
            cut[2::4] = [depth.get(name) for name in cut[2::4]]
            cuts[i] = tuple(cut)
    shapes = [tuple(map(spec.__getitem__, operands.values())) for operands in plan.operands]
    names, attrs = map(tuple, plan.operands), [tuple(attrs.items()) for attrs in plan.attrs]
    around = map(loops.__getitem__, plan.op_region)
    return zip(plan.kernel, plan.flops, plan.moved, names, shapes, cuts, around, attrs, strict=True)


def _check_sides(plan: _Plan, i: int) -> None:
    """Check that a shipped operator's launch reads and writes the operands that the operator does."""
    known, operands = _OPERATORS[plan.kernel[i]], plan.operands[i]
    for ids, names, side in ((plan.reads[i], known.reads, "reads "), (plan.writes[i], known.writes, "writes ")):
        scratch = ("scratch",) if side == "writes " else ()
        expected = {operands[name] for name in (*names, *scratch) if name in operands}
        if {*ids} != expected:
            _report_operands(plan, i, expected, side)


def _report_operands(plan: _Plan, i: int, named: Iterable[int], side: str) -> None:
    ids, expected = {"reads ": {*plan.reads[i]}, "writes ": {*plan.writes[i]}}.get(side), {*named}
    touched = {*plan.reads[i], *plan.writes[i]} if ids is None else ids
    text = f"{plan.say_op(i)} {side or 'touches '}{sorted(touched)}, its operands are {sorted(expected)}"
    plan.fail("operands", text, sorted(touched ^ expected), (i,))


def _number_loops(plan: _Plan) -> tuple[dict[str | None, int], dict[str | None, dict[str, int]]]:
    """Number the loops so that loops of one knob in different layers are equal; the depth of each loop's parents."""
    numbers: dict[Any, int] = {}
    loops: dict[str | None, int] = {None: -1}
    depths: dict[str | None, dict[str, int]] = {None: {}}
    for name, around in plan.enclosing.items():
        nest = tuple([plan.regions[at][1:6] for at in around])
        loops[name] = numbers.setdefault(nest, len(numbers))
        depths[name] = {at: depth for depth, at in enumerate(around)}
    return loops, depths


def _check_slices(plan: _Plan, i: int) -> bool:
    """Check that each sliced operand's axis has the length that the region's chunks cover."""
    before = len(plan.found)
    slices, operands, op_region = plan.slices[i], plan.operands[i], plan.op_region[i]
    around = plan.enclosing[op_region] if op_region is not None else ()
    for operand, axis, name, factor in slices:
        if name not in around or operand not in operands or axis >= len(plan.shape[operands[operand]]):
            what = "no region around it" if name not in around else "no such operand or axis"
            plan.fail("slice", f"{plan.say_op(i)} slices {operand}[{axis}] by '{name}': {what}", (), (i,))
            continue
        b = operands[operand]
        inside, length = plan.is_within(plan.home[b], name), plan.shape[b][axis]
        span = plan.regions[name].rows if inside else plan.regions[name].extent
        if length != factor * span:
            sliced = f"{plan.say_op(i)} slices {plan.say(b)} axis {axis} of {length} by '{name}'"
            plan.fail("slice", f"{sliced}: {factor} x {span} expected", (b,), (i,))
    if len(slices) > 1 and len(set(map(_OPERAND_AND_AXIS, slices))) != len(slices):
        plan.fail("slice", f"{plan.say_op(i)} slices one axis of an operand twice", (), (i,))
    return len(plan.found) == before


def _check_ops(plan: _Plan) -> None:
    """Check in-place pairs and edges."""
    for i, pairs in enumerate(plan.inplace):
        for written, read in pairs:
            if written == read or written not in plan.writes[i] or read not in plan.reads[i]:
                plan.fail(
                    "operands",
                    f"{plan.say_op(i)} in place: {written} is not written or {read} not read",
                    (written, read),
                    (i,),
                )
    sound: list[tuple[str, int, int]] = []
    for kind, a, b in plan.edges:
        sides = (plan.stream[a] != _MAIN, plan.stream[b] != _MAIN)
        if kind not in ("fork", "wait") or a >= b or sides != ((False, True) if kind == "fork" else (True, False)):
            text = f"'{kind}' from {plan.say_op(a)} on {plan.stream[a]!r} to {plan.say_op(b)} on {plan.stream[b]!r}"
            plan.fail("edge", f"{text}: a fork goes on from main to a side stream, a wait back", (), (a, b))
        else:
            sound.append((kind, a, b))
    plan.edges = sound
    for b in sorted({*chain.from_iterable(plan.writes)}):
        if plan.kind[b] == "weight":
            plan.fail("read-only", f"{plan.say(b)} is a weight and is written", (b,))


# Operators.

_Rule = tuple[str, str, str]


class _Operator(NamedTuple):
    """What a shipped operator says of one launch, in letters.

    `shapes` lists operands as `name:dtype=axes`; `?` marks an optional one. An axis is a letter, bound where it first
    occurs, or a product of letters, attributes and numbers, with `+1` at most; `*T` is any number of axes. Of dtypes, a
    lower-case letter is bound where it first occurs. `order` of the table is that in which letters can be bound.
    """

    shapes: str
    reads: str
    writes: str
    attrs: str = ""  # `name:type`; `?` as above
    flops: str = "0"
    whole: str = ""  # operands that a loop never slices
    moved: str = ""  # operands whose bytes count, repeated where they count twice; by default all, and updates twice
    rules: tuple[_Rule, ...] = ()  # (relation, product, product)


_STATISTICS: Final = "token:int64=C maximum:float32=C second:float32=C logsumexp:float32=C entropy:float32=C"
_STATISTIC_NAMES: Final = "token maximum second logsumexp entropy"
_NOTATION: Final = {
    "attention": _Operator(
        "q:a=*T,heads*head_size k=*S,kv_heads*head_size v=*S,kv_heads*head_size cu_seqlens=*B y:a=*T,heads*head_size",
        "q k v cu_seqlens", "y", "heads:n kv_heads:n head_size:n scale:x pairs?:n", "4*pairs*heads*head_size", "k v",
        rules=(("divides", "kv_heads", "heads"),),
    ),
    "confidence": _Operator("maximum:a=*M logsumexp:a=*M y:a=*M", "maximum logsumexp", "y", flops="2*M"),
    "embedding": _Operator("ids:index=T table:a=V,D y:a=T,D", "ids table", "y", moved="ids y y"),
    "gather_rows": _Operator("x:a=S,*D rows:index=C y:a=C,*D", "x rows", "y", whole="x", moved="rows y y"),
    "grouped_linear": _Operator(
        "x:a=R,I weight=E,O,I offsets=E+1 y:a=R,O", "x weight offsets", "y", flops="2*R*I*O"
    ),
    "head_norm": _Operator(
        "weight=H x=*T,heads*H", "x weight", "x", "heads:n eps:x", "4*T*heads*H"
    ),
    "linear": _Operator("x:a=*T,I weight=O,I bias?=O y:a=*T,O", "x weight bias?", "y", flops="2*T*I*O"),
    "linear_add": _Operator("x=*T,I weight=O,I y=*T,O", "x weight y", "y", flops="2*T*I*O"),
    "moe_combine": _Operator("x=C,D scores=C,K order=C*K y=C*K,D", "y order scores x", "x", flops="2*C*K*D"),
    "moe_gather": _Operator("x:a=C,D order=C*top_k y:a=C*top_k,D", "x order", "y", "top_k:n"),
    "moe_route": _Operator(
        "x:a=C,D weight=E,D scores:a=C,top_k experts:int64=C,top_k", "x weight", "scores experts",
        "top_k:n normalize:b", "2*C*D*E", rules=(("at most", "top_k", "E"),),
    ),
    "moe_sort": _Operator(
        "experts=C,K order:int64=C*K offsets:int64=num_experts+1", "experts", "order offsets", "num_experts:n"
    ),
    "rms_norm": _Operator("x:a=*T,D weight=D y:a=*T,D", "x weight", "y", "eps:x", "4*T*D"),
    "rotary": _Operator(
        "x=T,heads*head_size positions=T inv_freq=R", "x positions inv_freq", "x", "heads:n head_size:n",
        "6*T*heads*head_size", rules=(("at most", "2*R", "head_size"),),
    ),
    "row_stats": _Operator(f"logits=C,*V {_STATISTICS}", "logits", _STATISTIC_NAMES, flops="6*C*V"),
    "shift_rows": _Operator("rows:a=M cu_seqlens=*B y:a=M", "rows cu_seqlens", "y"),
    "silu_mul": _Operator("gate:a=*F up:a=*F", "gate up", "gate", flops="5*F"),
    "unembed_stats": _Operator(f"x=C,D weight=V,D {_STATISTICS}", "x weight", _STATISTIC_NAMES, flops="2*C*D*V"),
}  # fmt: skip
_ATTRIBUTE: Final[Mapping[str, _Types]] = {"n": _INT, "x": _NUMBER, "b": _BOOL}
_INDEX_DTYPES: Final = ("int64", "int32")


class _Axis(NamedTuple):
    """Length of an axis in a full iteration, and which loop slices it by how many of its rows per row."""

    length: int
    loop: str | None = None
    factor: int = 0


_Letters = dict[str, tuple[_Axis, ...]]
_Product = tuple[tuple[str, ...], int]  # factors, and what is added to their product


class _Operand(NamedTuple):
    name: str
    dtype: str
    axes: tuple[str | _Product, ...]  # a name with `*` for any number of axes, or a product
    optional: bool


class _Known(NamedTuple):
    """An operator, parsed."""

    operands: tuple[_Operand, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    attrs: Mapping[str, _Types]
    optional: frozenset[str]
    flops: tuple[str, ...]
    whole: frozenset[str]
    moved: tuple[str, ...]
    rules: tuple[_Rule, ...]


def _product(text: str) -> _Product:
    factors, _, added = text.partition("+")
    return tuple(factors.split("*")), int(added or 0)


def _parse(operator: _Operator) -> _Known:
    operands, attrs, optional = [], {}, set()
    for entry in operator.shapes.split():
        label, _, axes = entry.partition("=")
        name, _, dtype = label.partition(":")
        operands.append(
            _Operand(
                name.rstrip("?"),
                dtype,
                tuple(a if a[0] == "*" else _product(a) for a in axes.split(",")),
                name[-1] == "?",
            )
        )
    for entry in operator.attrs.split():
        name, _, kind = entry.partition(":")
        attrs[name.rstrip("?")] = _ATTRIBUTE[kind]
        if name[-1] == "?":
            optional.add(name[:-1])
    reads, writes = (tuple(side.replace("?", "").split()) for side in (operator.reads, operator.writes))
    moved = tuple(operator.moved.split()) or (*reads, *writes)
    return _Known(
        tuple(operands), reads, writes, attrs, frozenset(optional), tuple(operator.flops.split("*")),
        frozenset(operator.whole.split()), moved, operator.rules,
    )  # fmt: skip


_OPERATORS: Final = {name: _parse(operator) for name, operator in _NOTATION.items()}


def _check_operator(plan: _Plan, i: int) -> tuple[Sequence[str], Sequence[str]] | None:
    """Check one launch of a shipped operator against its table entry; name the operands that it reads and writes."""
    known = _OPERATORS.get(plan.kernel[i])
    if known is None:
        return None
    operands, attrs = plan.operands[i], plan.attrs[i]

    def fail(message: str, *buffers: int) -> None:
        plan.fail("operator", f"{plan.say_op(i)}: {plan.kernel[i]} {message}", buffers, (i,))

    names = [entry.name for entry in known.operands if entry.name in operands or not entry.optional]
    if operands.keys() - {"scratch"} != set(names):
        fail(f"takes {', '.join(names)}, got {', '.join(operands)}")
        return None
    odd = {key for key in attrs if type(attrs[key]) not in known.attrs.get(key, ())}
    odd.update(known.attrs.keys() - attrs.keys() - known.optional)
    if odd:
        wanted = ", ".join(f"{key} ({_type_names(types)})" for key, types in known.attrs.items()) or "none"
        fail(f"has attributes {wanted}; amiss: {', '.join(f'{key}={attrs.get(key)!r}' for key in sorted(odd))}")
        return None
    views = {name: _view(plan, i, name) for name in names}
    letters: _Letters = {name: (_Axis(value),) for name, value in attrs.items() if type(value) is int}
    dtypes: dict[str, str] = {}
    for entry in known.operands:
        if entry.name not in views:
            continue
        b, view = operands[entry.name], views[entry.name]
        if not _unify_shape(entry.axes, view, letters):
            expected = ", ".join(_spell(axis, letters) for axis in entry.axes)
            fail(f"sees {entry.name} {plan.say(b)} as {_shown(view)}, expected [{expected}]", b)
            return None
        if not _unify_dtype(entry.dtype, plan.dtype[b], dtypes):
            fail(f"has {entry.name} {plan.say(b)} in {plan.dtype[b]}, not {dtypes.get(entry.dtype, entry.dtype)}", b)
        if entry.name in known.whole and any(axis.loop is not None for axis in view):
            fail(f"needs the whole of {entry.name} {plan.say(b)}", b)
    for relation, left, right in known.rules:
        low, high = _evaluate(_product(left), letters), _evaluate(_product(right), letters)
        if low is not None and high is not None:
            bad = low.length < 1 or high.length % low.length if relation == "divides" else low.length > high.length
            if bad:
                fail(f"needs {left} {relation} {right}: {low.length}, {high.length}")
    _check_work(plan, i, known, views, letters)
    _check_full_step(plan, i, letters)
    scratch = ("scratch",) if "scratch" in operands else ()
    return tuple(name for name in known.reads if name in operands), (*known.writes, *scratch)


def _view(plan: _Plan, i: int, operand: str) -> tuple[_Axis, ...]:
    """An operand as one full iteration of the loops around an op sees it."""
    b = plan.operands[i][operand]
    axes = [_Axis(length) for length in plan.shape[b]]
    for name, axis, loop, factor in plan.slices[i]:
        if name == operand:
            axes[axis] = _Axis(factor * plan.regions[loop].rows, loop, factor)
    return tuple(axes)


def _evaluate(product: _Product, letters: _Letters) -> _Axis | None:
    """The axis that a product stands for; None if it is unknown."""
    length, loop, factor = 1, None, 1
    for name in product[0]:
        if name.isdecimal():
            axis = _Axis(int(name))
        elif len(letters.get(name, ())) == 1:
            axis = letters[name][0]
        else:
            return None
        length *= axis.length
        if axis.loop is None:
            factor *= axis.length
        elif loop is None:
            loop, factor = axis.loop, factor * axis.factor
        else:
            return None
    return _Axis(length + product[1], loop, factor if loop is not None else 0)


def _unify_shape(axes: Sequence[str | _Product], view: Sequence[_Axis], letters: _Letters) -> bool:
    """Bind new letters and compare known ones."""
    spread = len(view) - len(axes) + 1
    if spread < 0 or (spread != 1 and not any(isinstance(axis, str) for axis in axes)):
        return False
    at = 0
    for axis in axes:
        if isinstance(axis, str):
            seen = tuple(view[at : at + spread])
            at += spread
            if letters.setdefault(axis[1:], seen) != seen:
                return False
            continue
        actual = view[at]
        at += 1
        name = axis[0][0]
        if axis[0] == (name,) and not axis[1] and name not in letters:
            letters[name] = (actual,)
        elif axis[0][-1] not in letters and axis == ((name,), 1):
            letters[name] = (_Axis(actual.length - 1),)
        elif _evaluate(axis, letters) != actual:
            return False
    return True


def _unify_dtype(expected: str, dtype: str, dtypes: dict[str, str]) -> bool:
    if expected == "index":
        return dtype in _INDEX_DTYPES
    if len(expected) == 1:
        return dtypes.setdefault(expected, dtype) == dtype
    return not expected or dtype == expected


def _spell(axis: str | _Product, letters: _Letters) -> str:
    if isinstance(axis, str):
        return ", ".join(map(_length, letters.get(axis[1:], ()))) or axis[1:]
    value = _evaluate(axis, letters)
    return "*".join(axis[0]) if value is None else _length(value)


def _length(axis: _Axis) -> str:
    return str(axis.length) if axis.loop is None else f"{axis.length} by '{axis.loop}'"


def _shown(view: Iterable[_Axis]) -> str:
    return f"[{', '.join(map(_length, view))}]"


def _over_iterations(plan: _Plan, i: int, axes: Iterable[_Axis]) -> int | None:
    """Product of axes, summed over all iterations of the loops around op i; None if two axes follow one loop."""
    name, total = plan.op_region[i], 1
    loops = list(plan.enclosing[name]) if name is not None else []
    for axis in axes:
        if axis.loop is None:
            total *= axis.length
        elif axis.loop in loops:
            loops.remove(axis.loop)
            total *= axis.factor * plan.regions[axis.loop].extent
        else:
            return None
    return total * prod(plan.regions[loop].num_chunks for loop in loops)


def _check_work(plan: _Plan, i: int, known: _Known, views: Mapping[str, Sequence[_Axis]], letters: _Letters) -> None:
    """Check the FLOPs and bytes of all iterations together."""
    dims = plan.document["dims"]
    if "pairs" in dims:
        letters.setdefault("pairs", (_Axis(dims["pairs"]),))
    factors = [(_Axis(int(name)),) if name.isdecimal() else letters.get(name) for name in known.flops]
    if None not in factors:  # attention without a dim or attribute of its pairs: the graph's own word
        flops = _over_iterations(plan, i, chain.from_iterable(filter(None, factors)))
        if flops is not None and flops != plan.flops[i]:
            plan.fail("flops", f"{plan.say_op(i)}: {plan.flops[i]} FLOPs, {'*'.join(known.flops)} is {flops}", (), (i,))
    total = 0
    for name in known.moved:
        if name in views:
            elements = _over_iterations(plan, i, views[name])
            if elements is None:
                return
            total += elements * _ITEM_BYTES[plan.dtype[plan.operands[i][name]]]
    if total != plan.moved[i]:
        plan.fail("bytes", f"{plan.say_op(i)}: {plan.moved[i]} bytes, its operands have {total}", (), (i,))


# Where the shipped step shows its dims: (kernel, letter, dim, what the letter exceeds the dim by).
_SHOWN_DIMS: Final = {
    "embedding": ("T", "tokens", 0),
    "attention": ("B", "seqs", 1),
    "confidence": ("M", "masked", 0),
}


def _check_full_step(plan: _Plan, i: int, letters: _Letters) -> None:
    """Check that operators of the shipped step run over as many rows as its dims say."""
    letter, dim, more = _SHOWN_DIMS.get(plan.kernel[i], ("", "", 0))
    if plan.document["phase"] != _FULL_STEP or dim not in plan.document["dims"]:
        return
    rows, expected = _over_iterations(plan, i, letters[letter]), plan.document["dims"][dim] + more
    if plan.op_region[i] is None and rows != expected:
        plan.fail("dims", f"{plan.say_op(i)} runs over {rows} rows, dims say {dim}={expected - more}", (), (i,))


# Lifetimes.


def _derive_lifetimes(plan: _Plan) -> None:
    """Derive each buffer's lifetime from accesses, regions, barriers and streams, and compare it with the claim."""
    read_first = _derive_base(plan)
    if plan.regions or any(barrier.region is not None for barrier in plan.barriers):
        _stretch_regions(plan, read_first)
    for barrier in plan.barriers:
        if barrier.region is None:
            if barrier.outputs or barrier.carried:
                plan.fail(
                    "barrier-mismatch", f"barrier '{barrier.name}' is explicit and lists outputs or carried buffers"
                )
            for b in barrier.inputs:
                _hold(plan, b, barrier.start, barrier.end)
    if plan.has_side_streams:
        _stretch_streams(plan)
    for b, root in enumerate(plan.alias_of):
        if root is not None:
            plan.own.setdefault(root, (plan.start[root], plan.end[root]))
            plan.members[root].append(b)
            plan.start[root] = min(plan.start[root], plan.start[b])
            plan.end[root] = max(plan.end[root], plan.end[b])
    if plan.start != list(plan.claimed_start) or plan.end != list(plan.claimed_end):
        _report_lifetimes(plan)


def _derive_base(plan: _Plan) -> list[int]:
    """Fill `start` and `end` from accesses and kinds; return the buffers that are read before they are written."""
    num_ops, kind = len(plan.op_name), plan.kind
    first, last = [-1] * len(kind), [-1] * len(kind)
    read_first: list[int] = []
    for i, (reads, writes) in enumerate(zip(plan.reads, plan.writes, strict=True)):
        for b in reads:
            if first[b] < 0:
                first[b] = i
                read_first.append(b)
            last[b] = i
        for b in writes:
            if first[b] < 0:
                first[b] = i
            last[b] = i
    plan.start = [0 if k in _FROM_START else i for k, i in zip(kind, first, strict=True)]
    plan.end = [num_ops if k in _TO_END else i + 1 for k, i in zip(kind, last, strict=True)]
    written = set(chain.from_iterable(plan.writes))
    for b in read_first:
        if kind[b] == "carry":
            plan.start[b] = 0
        elif kind[b] == "host":
            plan.start[b], plan.end[b] = 0, num_ops
        elif kind[b] not in _FROM_START and (plan.home[b] is None or b not in written):
            plan.fail(
                "read-before-write",
                f"{plan.say(b)} is read by {plan.say_op(first[b])} before any write",
                (b,),
                (first[b],),
            )
    for b in written:
        if kind[b] == "carry":
            plan.end[b] = num_ops
    if -1 in first:
        _settle_untouched(plan, first)
    for b, home in enumerate(plan.home if plan.regions else ()):
        if home is not None and not (plan.regions[home].start <= first[b] and last[b] < plan.regions[home].end):
            plan.fail("region", f"{plan.say(b)} is touched outside its home region '{home}'", (b,), (first[b], last[b]))
    return read_first


def _settle_untouched(plan: _Plan, first: Sequence[int]) -> None:
    """Settle the lifetimes of buffers that no op touches."""
    roots = {*plan.alias_of}
    for b, at in enumerate(first):
        kind = plan.kind[b]
        if at >= 0 or (kind in _FROM_START and kind in _TO_END):
            continue
        if kind == "input":
            plan.end[b] = max(plan.end[b], 1)
        elif b in roots:  # storage only: its aliases give it a lifetime
            plan.start[b], plan.end[b] = len(plan.op_name), 0
        else:
            plan.start[b] = plan.end[b] = 0
            plan.fail("unused", f"{plan.say(b)} is touched by no op", (b,))


def _hold(plan: _Plan, b: int, start: int, end: int) -> None:
    """Stretch a buffer's lifetime over an interval in which it may have no gap either."""
    plan.start[b] = min(plan.start[b], start)
    plan.end[b] = max(plan.end[b], end)
    plan.windows[b].append((start, end))


def _stretch_regions(plan: _Plan, read_first: Sequence[int]) -> None:
    """Stretch lifetimes over loops and compare what crosses each loop's border with its barrier."""
    start, end = plan.start, plan.end
    inside: dict[str, set[int]] = {name: set() for name in plan.regions}  # region -> buffers at home in it or deeper
    carried: dict[str, set[int]] = {name: set() for name in plan.regions}
    for b, home in enumerate(plan.home):
        if home is not None:
            for name in plan.enclosing[home]:
                inside[name].add(b)
    for b in read_first:
        at = plan.home[b]
        for name in plan.enclosing[at] if at is not None else ():
            carried[name].add(b)
            start[b] = min(start[b], plan.regions[name].start)
            end[b] = max(end[b], plan.regions[name].end)
    expected = {}
    weights = {b for b, kind in enumerate(plan.kind) if kind == "weight"}  # they live always and are not listed
    unlisted = {b for b, pool in enumerate(plan.pool) if pool not in ("workspace", "state")}
    for name, region in plan.regions.items():
        first, last = region.start, region.end
        outputs = set(chain.from_iterable(plan.writes[first:last])) - inside[name]
        inputs = set(chain.from_iterable(plan.reads[first:last])) - weights - outputs - inside[name]
        for b in inputs:
            if end[b] < last:
                end[b] = last
        for b in outputs:
            if start[b] > first:
                start[b] = first
            if end[b] < last:
                end[b] = last
        expected[name] = (inputs - unlisted, outputs - unlisted, carried[name] - unlisted)
    _check_barriers(plan, expected)


def _check_barriers(plan: _Plan, expected: Mapping[str, Sequence[set[int]]]) -> None:
    """Check that each region has one barrier and that it lists what the region holds."""
    seen: set[str] = set()
    for barrier in plan.barriers:
        label, name, first, last, *lists = barrier
        if name is None:
            continue
        if name not in expected or name in seen:
            plan.fail("barrier-mismatch", f"barrier '{label}' is of no region or a second one: '{name}'")
            continue
        seen.add(name)
        region = plan.regions[name]
        if first != region.start or last != region.end:
            text = f"barrier '{label}' covers [{first}, {last}), its region [{region.start}, {region.end})"
            plan.fail("barrier-mismatch", text)
        for k, (claimed, derived) in enumerate(zip(lists, expected[name], strict=True)):
            if len(claimed) != len(derived) or not derived.issuperset(claimed) or not derived.issubset(claimed):
                which = ("inputs", "outputs", "carried")[k]
                text = f"barrier '{label}' lists {which} {sorted(claimed)}, the ops say {sorted(derived)}"
                plan.fail("barrier-mismatch", text, sorted({*claimed} ^ derived))
    for name, held in expected.items():
        if name not in seen:
            plan.fail("barrier-missing", f"region '{name}' has no barrier", sorted(set().union(*held)))


def _stretch_streams(plan: _Plan) -> None:
    """Hold what side ops touch from their fork to their join; check that loops hold both."""
    num_ops = len(plan.op_name)
    forked: dict[int, int] = {}
    joined: dict[int, int] = {}
    for kind, a, b in plan.edges:
        if kind == "fork":
            forked[b] = max(forked.get(b, -1), a)
        else:
            joined[a] = min(joined.get(a, num_ops), b)
    lanes: dict[str, list[int]] = defaultdict(list)
    for i, stream in enumerate(plan.stream):
        if stream != _MAIN:
            lanes[stream].append(i)
    for lane in lanes.values():
        forks = accumulate((forked.get(i, -1) for i in lane), max)
        waits = list(accumulate((joined.get(i, num_ops) for i in reversed(lane)), min))
        for i, fork, wait in zip(lane, forks, reversed(waits), strict=True):
            _hold_side_op(plan, i, fork, wait)


def _hold_side_op(plan: _Plan, i: int, fork: int, wait: int) -> None:
    touched = {*plan.reads[i], *plan.writes[i]}
    for b in touched:
        _hold(plan, b, fork + 1, wait)
    region = plan.op_region[i]
    for name in plan.enclosing[region] if region is not None else ():
        loop = plan.regions[name]
        if loop.num_chunks > 1 and not (loop.start <= fork and wait < loop.end):
            plan.fail(
                "stream-race",
                f"{plan.say_op(i)} runs beside loop '{name}' but is not forked and joined inside it",
                (),
                (i,),
            )
    if wait == len(plan.op_name):
        loose = sorted(b for b in touched if plan.pool[b] == "workspace")
        if loose:
            names = ", ".join(map(plan.say, loose))
            plan.fail(
                "stream-race", f"{plan.say_op(i)} is never joined and touches the workspace: {names}", loose, (i,)
            )


def _report_lifetimes(plan: _Plan) -> None:
    rows = zip(plan.claimed_start, plan.claimed_end, plan.start, plan.end, strict=True)
    for b, (start, end, first, last) in enumerate(rows):
        text = f"{plan.say(b)} claims [{start}, {end}), the ops, regions, barriers and streams give [{first}, {last})"
        if start > first or end < last:
            plan.fail("lifetime-short", text, (b,))
        if start < first or end > last:
            plan.fail("lifetime-long", text, (b,))


# Sizes, alignment, pools.


def _check_sizes(plan: _Plan) -> None:
    """Check each size against shape and dtype, and a root's against its aliases."""
    item_bytes = map(_ITEM_BYTES.__getitem__, plan.dtype)
    plan.raw_bytes = list(map(mul, map(mul, map(prod, plan.shape), item_bytes), plan.rotate))
    rounded = [-(-raw // unit) * unit for raw, unit in zip(plan.raw_bytes, plan.alignment, strict=True)]
    odd = set() if rounded == list(plan.size) else {b for b, size in enumerate(rounded) if size != plan.size[b]}
    for b in sorted(odd.union(plan.members)):
        raw, size, unit = plan.raw_bytes[b], plan.size[b], plan.alignment[b]
        slots = plan.rotate[b]
        own = slots * _round_up(raw // slots, unit)
        covered = max((plan.alias_offset[m] + plan.size[m] for m in plan.members.get(b, ())), default=0)
        expected = _round_up(max(own, covered), unit)
        if size == expected or (size == max(raw, covered) and plan.pool[b] not in _PAGED):
            continue
        shape = f"{plan.dtype[b]}{list(plan.shape[b])} needs {raw} bytes"
        aliases = f", aliases reach {covered}" if covered else ""
        plan.fail("size", f"{plan.say(b)}: size {size}, expected {expected}: {shape} in {slots} slots{aliases}", (b,))


def _check_placement(plan: _Plan) -> None:
    """Check alignment, kinds of pools and pool bounds."""
    if any(map(mod, plan.offset, plan.alignment)):
        for b, (offset, unit, pool) in enumerate(zip(plan.offset, plan.alignment, plan.pool, strict=True)):
            if offset % unit and pool != "external":
                plan.fail("alignment", f"{plan.say(b)}: offset {offset} is not a multiple of {unit}", (b,))
    for unit in sorted({*plan.alignment}):
        if unit & (unit - 1):
            plan.fail("alignment", f"alignment {unit} is not a power of two")
    if min(plan.alignment, default=_UNIT_BYTES) < _UNIT_BYTES:
        for b, (unit, pool, root) in enumerate(zip(plan.alignment, plan.pool, plan.alias_of, strict=True)):
            if unit < _UNIT_BYTES and pool in _PAGED and root is None:
                plan.fail(
                    "alignment", f"{plan.say(b)}: alignment {unit}, in pool '{pool}' at least {_UNIT_BYTES}", (b,)
                )
    for odd in sorted({*zip(plan.kind, plan.pool, strict=True)}):
        if not _may_live_in(*odd):
            for b, at in enumerate(zip(plan.kind, plan.pool, strict=True)):
                if at == odd and plan.alias_of[b] is None:
                    plan.fail("pool", f"{plan.say(b)}: kind '{odd[0]}' does not belong in pool '{odd[1]}'", (b,))
    plan.top = list(map(add, plan.offset, plan.size))
    for pool in dict.fromkeys(plan.pool):
        ids = [b for b, at in enumerate(plan.pool) if at == pool]
        plan.reach[pool] = max(map(plan.top.__getitem__, ids))
        plan.roots[pool] = [b for b in ids if plan.alias_of[b] is None]
    _check_bounds(plan)


def _check_bounds(plan: _Plan) -> None:
    page = plan.document["page_bytes"]
    for pool, capacity in plan.pools.items():
        if pool in _PAGED and (capacity < 0 or capacity % page):
            plan.fail("pool-bounds", f"pool '{pool}': capacity {capacity} is not a multiple of the page, {page}")
    for pool, reach in plan.reach.items():
        limit = plan.pools.get(pool)
        if limit is None and pool in _PAGED:
            plan.fail("pool-bounds", f"pool '{pool}' is used but not listed", plan.roots[pool])
        elif limit is not None and reach > limit:
            for b, top in enumerate(plan.top):
                if plan.pool[b] == pool and top > limit:
                    plan.fail("pool-bounds", f"{plan.say(b)} ends at {top}, pool '{pool}' has {limit} bytes", (b,))


def _may_live_in(kind: str, pool: str) -> bool:
    """Whether a pool suits a kind: other plans share the workspace, so what outlives a step may not be in it."""
    if kind == "weight":
        return pool not in ("workspace", "state")
    if kind == "state":
        return pool not in ("workspace", "weights")
    return pool != "weights" and (pool == kind or kind not in ("host", "external"))


# Aliases.


def _check_aliases(plan: _Plan) -> None:
    """Check where aliases lie and that no op reads a value that another member has overwritten."""
    if any(plan.alias_offset):
        for b, at in enumerate(plan.alias_offset):
            if at and plan.alias_of[b] is None:
                plan.fail("alias", f"{plan.say(b)} is no alias but has alias_offset {at}", (b,))
    for root, b in sorted((root, b) for root, aliases in plan.members.items() for b in aliases):
        if root == b or plan.alias_of[root] is not None:
            plan.fail("alias", f"{plan.say(b)} is an alias of {plan.say(root)}, which is not a root", (b, root))
            continue
        at = plan.alias_offset[b]
        if plan.pool[b] != plan.pool[root]:
            plan.fail(
                "alias", f"{plan.say(b)} in pool '{plan.pool[b]}' is an alias in pool '{plan.pool[root]}'", (b, root)
            )
        if plan.offset[b] != plan.offset[root] + at:
            text = f"{plan.say(b)} is at {plan.offset[b]}, its root {plan.say(root)} at {plan.offset[root]} + {at}"
            plan.fail("alias", text, (b, root))
        if at < 0 or at + plan.size[b] > plan.size[root]:
            bounds = f"[{at}, {at + plan.size[b]}) is not inside the {plan.size[root]} bytes"
            plan.fail("alias", f"{plan.say(b)}: {bounds} of {plan.say(root)}", (b, root))
    for root in plan.members:
        group = plan.group(root)
        if not _is_plainly_legal(plan, group):
            _walk_values(plan, group)


def _is_plainly_legal(plan: _Plan, group: Sequence[int]) -> bool:
    """Whether members that share bytes never hold values at the same time, but for plain in-place ops."""
    own = {b: plan.own.get(b, (plan.start[b], plan.end[b])) for b in group}
    ordered = sorted(group, key=lambda b: own[b])
    for k, later in enumerate(ordered):
        t = own[later][0]
        for earlier in ordered[:k]:
            end = own[earlier][1]
            if (
                end > t
                and plan.share_bytes(earlier, later)
                and not (end == t + 1 and _is_plain_inplace(plan, t, earlier, later))
            ):
                return False
    return True


def _is_plain_inplace(plan: _Plan, t: int, old: int, new: int) -> bool:
    """Whether op t reads `old` last and writes `new` over it, in one and the same loop body, as it says it may."""
    return (
        plan.op_region[t] == plan.home[old] == plan.home[new]
        and old in plan.reads[t]
        and old not in plan.writes[t]
        and new not in plan.reads[t]
        and _may_overwrite(plan, t, old, new)
    )


def _may_overwrite(plan: _Plan, t: int, old: int, new: int) -> bool:
    return (
        any(written == new and read == old for written, read in plan.inplace[t])
        and plan.alias_offset[old] == plan.alias_offset[new]
        and plan.raw_bytes[old] == plan.raw_bytes[new]
    )


_Slicing = tuple[Any, ...]  # where a loop's iterations cut a buffer; equal ones cut the same bytes
_Passes = Mapping[str, int]  # loop -> which of the two replayed iterations


def _walk_values(plan: _Plan, group: Sequence[int]) -> None:
    """Follow an alias group's values through the program, each loop body twice; report reads of overwritten ones."""
    events = sorted({i for ops in _accesses(plan, group).values() for i in ops})
    held: dict[int, tuple[_Slicing | None, set[tuple[int, ...]]]] = {}  # member -> what of it other members overwrote
    for b in group:
        if plan.kind[b] in _FROM_START or plan.kind[b] in ("carry", "host"):
            held[b] = (None, set())
    lost: dict[int, int] = {}  # member -> op that overwrote it
    stale: dict[tuple[int, int], str] = {}
    for i, passes in _replay(plan, events, 0, {}):
        reads, writes = [b for b in group if b in plan.reads[i]], [b for b in group if b in plan.writes[i]]
        for b in reads:
            if b in lost and not _still_holds(plan, i, b, passes, held.get(b)):
                stale.setdefault((i, b), f"{plan.say_op(i)} reads {plan.say(b)}, overwritten by {plan.say_op(lost[b])}")
        for new in writes:
            slicing = _slicing(plan, i, new)
            at = _iteration(slicing, passes)
            for old in group:
                if old == new or not plan.share_bytes(old, new):
                    continue
                in_place = _may_overwrite(plan, i, old, new) and slicing == _slicing(plan, i, old)
                if old in writes or (old in reads and not in_place):
                    stale.setdefault(
                        (i, old), f"{plan.say_op(i)} writes {plan.say(new)} over its own operand {plan.say(old)}"
                    )
                last = i + 1 if old in reads and in_place else i  # an overwritten operand may be held up to this op
                if old in held and any(start <= i and end > last for start, end in plan.windows[old]):
                    stale.setdefault(
                        (i, old), f"{plan.say_op(i)} overwrites {plan.say(old)}, which a barrier or stream holds"
                    )
                if old in held:
                    lost[old] = i
                    before, cut = held[old]
                    if slicing is None or (before is not None and before != slicing):
                        del held[old]
                    else:
                        held[old] = (slicing, {*cut, at})
            if new not in reads:
                held[new] = (None, set())
                lost.pop(new, None)
    for b in group:
        if b in lost and (plan.kind[b] in _TO_END or plan.kind[b] == "carry") and plan.end[b] == len(plan.op_name):
            stale.setdefault((lost[b], b), f"{plan.say_op(lost[b])} overwrites {plan.say(b)}, which the step hands on")
    for (i, b), text in stale.items():
        plan.fail("alias-stale-read", text, (b,), (i,))


def _accesses(plan: _Plan, ids: Collection[int]) -> dict[int, list[int]]:
    """Each buffer's ops, in order."""
    wanted = frozenset(ids)
    accesses: dict[int, list[int]] = {b: [] for b in ids}
    for i, (reads, writes) in enumerate(zip(plan.reads, plan.writes, strict=True)):
        if not (wanted.isdisjoint(reads) and wanted.isdisjoint(writes)):
            for b in wanted.intersection((*reads, *writes)):
                accesses[b].append(i)
    return accesses


def _replay(plan: _Plan, events: Sequence[int], depth: int, passes: _Passes) -> Iterator[tuple[int, _Passes]]:
    """Yield ops in execution order, the bodies of loops twice, with the iteration of each loop around."""
    k = 0
    while k < len(events):
        name = plan.op_region[events[k]]
        around = plan.enclosing[name][::-1] if name is not None else ()
        if len(around) <= depth:
            yield events[k], passes
            k += 1
            continue
        loop = plan.regions[around[depth]]
        body = [i for i in events[k:] if i < loop.end]
        for iteration in range(min(loop.num_chunks, 2)):
            yield from _replay(plan, body, depth + 1, {**passes, loop.name: iteration})
        k += len(body)


def _slicing(plan: _Plan, i: int, b: int) -> _Slicing | None:
    """How loops outside which a buffer lives cut it at op i; None if op i sees the same bytes in each iteration."""
    names = {operand for operand, at in plan.operands[i].items() if at == b}
    cuts = [(axis, name, factor) for operand, axis, name, factor in plan.slices[i] if operand in names]
    cuts = [cut for cut in cuts if not plan.is_within(plan.home[b], cut[1])]
    if not cuts or len(names) != 1:
        return None
    return (plan.alias_offset[b], tuple(plan.shape[b]), _ITEM_BYTES[plan.dtype[b]], *sorted(cuts))


def _iteration(slicing: _Slicing | None, passes: _Passes) -> tuple[int, ...]:
    return () if slicing is None else tuple(passes[name] for _, name, _ in slicing[3:])


def _still_holds(
    plan: _Plan, i: int, b: int, passes: _Passes, held: tuple[_Slicing | None, set[tuple[int, ...]]] | None
) -> bool:
    """Whether the slice that op i reads is one that no other member has overwritten yet."""
    slicing = _slicing(plan, i, b)
    return (
        held is not None and slicing is not None and slicing == held[0] and _iteration(slicing, passes) not in held[1]
    )


# Gaps.

_Gaps = Mapping[int, Sequence[Sequence[int]]]


def _checked_gaps(plan: _Plan) -> _Gaps:
    """Check that each gap holds no value; return those of roots that hold none, in order."""
    owners = [b for b, gaps in enumerate(plan.gaps) if gaps]
    if not owners:
        return {}
    touched = _accesses(plan, {m for b in owners for m in plan.group(b)})
    sound: dict[int, list[Sequence[int]]] = {}
    for b in owners:
        last = plan.start[b]
        for start, end in plan.gaps[b]:
            if not last <= start < end <= plan.end[b]:
                plan.fail(
                    "gap", f"{plan.say(b)}: gap [{start}, {end}) is empty, out of order or outside its lifetime", (b,)
                )
                continue
            last = end
            reasons = [r for m in plan.group(b) for r in _values_in_gap(plan, m, touched[m], start, end)]
            if plan.pool[b] != "workspace":
                reasons.append(f"pool '{plan.pool[b]}' holds its values always")
            if not reasons and plan.alias_of[b] is None:
                sound.setdefault(b, []).append((start, end))
            for reason in reasons:
                plan.fail("gap", f"{plan.say(b)} claims no value in [{start}, {end}), but {reason}", (b,))
    return sound


def _values_in_gap(plan: _Plan, b: int, touched: _Ids, start: int, end: int) -> Iterator[str]:
    """Say why a buffer holds a value somewhere in [start, end)."""
    for i in touched:
        if start <= i < end:
            yield f"{plan.say_op(i)} touches {plan.say(b)}"
    for held_start, held_end in plan.windows.get(b, ()):
        if held_start < end and start < held_end:
            yield f"a barrier or a side stream holds {plan.say(b)} over [{held_start}, {held_end})"
    following = next((i for i in touched if i >= end), len(plan.op_name))
    firsts = [following] if following < len(plan.op_name) else []
    handed_on = plan.kind[b] in _TO_END or (plan.kind[b] == "carry" and plan.end[b] == len(plan.op_name))
    if not firsts and handed_on:
        yield f"{plan.say(b)} is handed on at the end of the step"
    for region in plan.regions.values():  # the way round: from the gap, or from after it, back to the loop's start
        if region.start < start < region.end and following >= region.end:
            firsts += [i for i in touched if region.start <= i < start][:1]
    for i in firsts:
        if not _overwrites_whole(plan, i, b):
            yield f"{plan.say_op(i)} does not overwrite the whole of {plan.say(b)} after it"


def _overwrites_whole(plan: _Plan, i: int, b: int) -> bool:
    return b in plan.writes[i] and b not in plan.reads[i] and _slicing(plan, i, b) is None


# Addresses.


def _check_addresses(plan: _Plan, gaps: _Gaps) -> None:
    """Check that no two roots that are live at the same time share an address, nor two that unordered ops touch."""
    roots = plan.roots if 0 not in plan.size else {p: [b for b in ids if plan.size[b]] for p, ids in plan.roots.items()}
    for pool in ("weights", "state"):
        ids = sorted(roots.get(pool, ()), key=plan.offset.__getitem__)
        reach = 0
        for b in ids:
            if plan.offset[b] < reach:
                always = dict.fromkeys(ids, 1)
                _report_clashes(plan, ids, always, always, "overlap", "both live always")
                break
            reach = plan.top[b]
    live: dict[int, int] = {}
    disjoint = True
    for pool in ("workspace", "host"):
        for b in roots.get(pool, ()):
            mask = (1 << plan.end[b]) - (1 << plan.start[b])
            for start, end in gaps.get(b, ()):
                mask ^= (1 << end) - (1 << start)
            live[b] = mask
        disjoint &= _sweep(plan, roots.get(pool, ()), live, live, "overlap", "live at the same time")
    if plan.has_side_streams:
        _check_order(plan, roots.get("workspace", ()) if disjoint else ())


def _sweep(
    plan: _Plan, ids: Sequence[int], mark: Mapping[int, int], clash: Mapping[int, int], code: str, reason: str
) -> bool:
    """Sweep addresses upwards with the union of the marks of the buffers there; False if a buffer clashes with it.

    The marks of buffers that share an address are disjoint up to the first clash, so leaving is an exclusive or.
    """
    offset, top = plan.offset, plan.top
    leaving = sorted(ids, key=top.__getitem__)
    here, k = 0, 0
    for b in sorted(ids, key=offset.__getitem__):
        at = offset[b]
        while top[leaving[k]] <= at:
            here ^= mark[leaving[k]]
            k += 1
        if here & clash[b]:
            _report_clashes(plan, ids, mark, clash, code, reason)
            return False
        here ^= mark[b]
    return True


def _report_clashes(
    plan: _Plan, ids: Sequence[int], mark: Mapping[int, int], clash: Mapping[int, int], code: str, reason: str
) -> None:
    """Name every pair that shares addresses and clashes. Quadratic; only for plans that are already refused."""
    offset, top = plan.offset, plan.top
    for k, b in enumerate(ids):
        for c in ids[:k]:
            if mark[c] & clash[b] and offset[c] < top[b] and offset[b] < top[c]:
                text = (
                    f"{plan.say(c)} at [{offset[c]}, {top[c]}) and {plan.say(b)} at [{offset[b]}, {top[b]}): {reason}"
                )
                common = (mark[c] & clash[b]).bit_length() - 1
                plan.fail(code, text, (c, b), (common,) if common < len(plan.op_name) else ())


# Streams.


def _check_order(plan: _Plan, roots: Sequence[int]) -> None:
    """Check that unordered ops touch no common value of which one is written, nor buffers at common addresses."""
    unordered = _unordered_ops(plan)
    touched = [0] * len(plan.name)
    for i, (reads, writes) in enumerate(zip(plan.reads, plan.writes, strict=True)):
        for b in (*reads, *writes):
            touched[b] |= 1 << i
    for i, others in enumerate(unordered):
        if not others:
            continue
        for b in plan.writes[i]:
            root = plan.alias_of[b]
            for m in plan.group(b if root is None else root):
                racing = touched[m] & others
                if racing and plan.share_bytes(b, m):
                    other = racing.bit_length() - 1
                    text = f"{plan.say_op(i)} writes {plan.say(b)}, {plan.say_op(other)} touches {plan.say(m)}"
                    plan.fail("stream-race", f"{text}, in no order", sorted({b, m}), sorted((i, other)))
    mark: dict[int, int] = {}
    clash: dict[int, int] = {}
    for b in roots:
        for m in plan.group(b):
            mark[b] = mark.get(b, 0) | touched[m]
        clash[b] = 0
    for i, others in enumerate(unordered):
        if others:
            for b in {*plan.reads[i], *plan.writes[i]}:
                root = plan.alias_of[b]
                at = b if root is None else root
                if at in clash:
                    clash[at] |= others
    _sweep(plan, roots, mark, clash, "stream-race", "ops of two streams touch them in no order")


def _unordered_ops(plan: _Plan) -> list[int]:
    """For each op, the bit set of the ops that neither program order on a stream nor edges order with it."""
    num_ops = len(plan.op_name)
    waits_for: dict[int, list[int]] = defaultdict(list)
    for _, a, b in plan.edges:
        waits_for[b].append(a)
    before: list[int] = []
    latest: dict[str, int] = {}
    for i, stream in enumerate(plan.stream):
        done = 0
        for a in (*waits_for.get(i, ()), latest.get(stream, -1)):
            if a >= 0:
                done |= before[a] | 1 << a
        before.append(done)
        latest[stream] = i
    after = [0] * num_ops
    for i in range(num_ops):
        done = before[i]
        missing = done ^ ((1 << i) - 1)  # earlier in program order, unordered with i
        after[i] |= missing
        while missing:
            a = missing & -missing
            after[a.bit_length() - 1] |= 1 << i
            missing ^= a
    return after


# Totals.


def _check_claims(plan: _Plan, gaps: _Gaps) -> None:
    """Check peak, lower bound, components and whether the plan fits."""
    document = plan.document
    live, slack = _live_bytes(plan, gaps)
    peak, lower_bound, page = plan.reach.get("workspace", 0), max(live), document["page_bytes"]
    components, total = document["components"], sum(document["components"].values())
    facts: list[tuple[str, str, Any, Any, str]] = [
        ("peak", "peak_bytes", document["peak_bytes"], peak, "the top of the workspace's buffers"),
        ("lower-bound", "lower_bound_bytes", document["lower_bound_bytes"], lower_bound, "the largest live set"),
        ("optimal", "optimal", document["optimal"], peak == lower_bound, "whether peak and lower bound are equal"),
        ("total", "total_bytes", document["total_bytes"], total, "the sum of the components"),
        (
            "fits",
            "fits",
            document["fits"],
            total <= document["budget_bytes"],
            f"whether {total} is within {document['budget_bytes']}",
        ),
    ]
    for pool in _PAGED:
        facts.append(
            (
                "components",
                f"components.{pool}",
                components[pool],
                _round_up(plan.reach.get(pool, 0), page),
                "the pages in use",
            )
        )
    for code, key, claimed, derived, meaning in facts:
        if claimed != derived:
            plan.fail(code, f"{key} is {claimed}, {meaning}: {derived}")
    _check_formula(plan, live, slack)
    _check_settings(plan)
    _check_profile(plan)
    _check_trace(plan)


def _live_bytes(plan: _Plan, gaps: _Gaps) -> tuple[list[int], list[int]]:
    """Bytes of the live workspace roots at each op, and by how many of them a formula of unrounded sizes may be lower.

    A formula gives an alias group the size of any one of its members.
    """
    change, loose = [0] * (len(plan.op_name) + 1), [0] * (len(plan.op_name) + 1)
    for b in plan.roots["workspace"]:
        size, first, last = plan.size[b], plan.start[b], plan.end[b]
        change[first] += size
        change[last] -= size
        spare = size - (min(map(plan.raw_bytes.__getitem__, plan.group(b))) if b in plan.members else plan.raw_bytes[b])
        if spare:
            loose[first] += spare
            loose[last] -= spare
        for start, end in gaps.get(b, ()):
            change[start] -= size
            change[end] += size
            loose[start] -= spare
            loose[end] += spare
    return list(accumulate(change)), list(accumulate(loose))


def _check_formula(plan: _Plan, live: Sequence[int], slack: Sequence[int]) -> None:
    """Check that each line of the formula is what is live at its op, and that no live set exceeds them all."""
    document = plan.document
    values = dict(document["dims"])
    values.update((f"{knob}_rows", rows) for knob, rows in document["config"].items() if type(rows) is int)
    highest = 0
    for form in document["formula"]:
        value = _evaluate_sum(form["expr"], values)
        if value is None or form["at"] not in plan.op_name:
            what = "no sum of products of dims and rows" if value is None else f"at no op: {form['at']!r}"
            plan.fail("formula", f"'{form['expr']}' is {what}")
            continue
        at = plan.op_name.index(form["at"])
        highest = max(highest, value)
        if not live[at] - slack[at] <= value <= live[at]:
            text = f"'{form['expr']}' is {value}, at {plan.say_op(at)} {live[at] - slack[at]} to {live[at]} bytes live"
            plan.fail("formula", text, (), (at,))
    if max(live) > highest + max(slack):
        plan.fail("formula", f"its maximum is {highest}, the largest live set {max(live)}")


def _evaluate_sum(text: str, values: Mapping[str, int]) -> int | None:
    """Evaluate `3*a + 5*b*c**2 + 7`; None if it is written otherwise or names anything else."""
    total = 0
    for term in text.split(" + "):
        number, *factors = term.replace("**", "^").split("*")
        digits = number.removeprefix("-")
        if not (digits.isdecimal() and digits.isascii() and len(digits) <= _MAX_DIGITS):
            return None
        product = int(number)
        for factor in factors:
            name, caret, power = factor.partition("^")
            if name not in values or (caret and power not in _POWERS):
                return None
            product *= values[name] ** int(power or 1)
        total += product
    return total


def _check_settings(plan: _Plan) -> None:
    """Check regions against configuration and dims, and dims against each other and the inputs."""
    document = plan.document
    config, dims = document["config"], document["dims"]
    for region in plan.regions.values():
        if config.get(region.knob) != region.rows:
            rows = config.get(region.knob, "nothing")
            plan.fail("config", f"region '{region.name}' has {region.rows} rows, config says {region.knob}={rows!r}")
        if dims.get(region.dim) != region.extent:
            known = dims.get(region.dim, "nothing")
            plan.fail("dims", f"region '{region.name}' runs over {region.extent} {region.dim}, dims say {known!r}")
    idle = {knob for knob, rows in config.items() if type(rows) is int}.difference(
        r.knob for r in plan.regions.values()
    )
    if idle:
        plan.fail("config", f"{', '.join(sorted(idle))}: rows without a region")
    missing = [dim for dim in _STEP_DIMS if dim not in dims]
    if missing and document["phase"] == _FULL_STEP:
        plan.fail("dims", f"a {_FULL_STEP} has {', '.join(_STEP_DIMS)}; missing {', '.join(missing)}")
    if "tokens" not in dims or "seqs" not in dims:
        return
    tokens, seqs = dims["tokens"], dims["seqs"]
    if document["fits"] and seqs == 1 and tokens > document["max_ctx_tokens"]:
        plan.fail("context", f"max_ctx_tokens is {document['max_ctx_tokens']}, this plan fits with {tokens}")
    if document["phase"] != _FULL_STEP or missing:
        return
    lengths = {plan.shape[b][0] for b, kind in enumerate(plan.kind) if kind == "input" and plan.shape[b]}
    for dim, value in dims.items():
        if dim != "pairs" and value + (dim == "seqs") not in lengths:
            plan.fail("dims", f"no input has {value} {dim}")
    pairs, longest = dims["pairs"], tokens - seqs + 1
    if seqs > tokens or not tokens * tokens <= pairs * seqs <= seqs * (longest**2 + seqs - 1):
        plan.fail("dims", f"{seqs} sequences of {tokens} tokens cannot have {pairs} pairs")


def _check_profile(plan: _Plan) -> None:
    """Check mesh, pools and the device's memory against each other."""
    document = plan.document
    components, mesh = document["components"], document["mesh"]
    if mesh["size"] != prod(mesh["axes"].values()):
        plan.fail("mesh", f"{mesh['size']} devices in axes {mesh['axes']}")
    for name in _PAGED:
        if plan.pools.get(name, 0) != components[name]:
            plan.fail("pool", f"pool '{name}' has {plan.pools.get(name)} bytes, components say {components[name]}")
    for pool in document["pools"]:
        if pool["name"] not in _POOLS:
            plan.fail("pool", f"unknown pool {pool['name']!r}; known: {', '.join(sorted(_POOLS))}")
        elif pool["name"] in _PAGED and (pool["device"] == "cpu") != (document["backend"] == "cpu"):
            plan.fail("pool", f"pool '{pool['name']}' is on {pool['device']!r}, the backend is {document['backend']!r}")
    fixed = components["context"] + components["library"]
    if document["device_memory_bytes"] <= fixed:
        plan.fail("device", f"{document['device_memory_bytes']} bytes of memory, context and libraries take {fixed}")


def _check_trace(plan: _Plan) -> None:
    """Check the search steps against the plan where they speak of it: the same choices have the same fixed bytes."""
    document = plan.document
    config, page = document["config"], document["page_bytes"]
    fixed = document["total_bytes"] - document["components"]["workspace"]
    for k, step in enumerate(document["trace"]):
        other = step["config"]
        if other.keys() != config.keys():
            plan.fail(
                "config", f"trace[{k}] and the plan have different knobs: {', '.join(other.keys() ^ config.keys())}"
            )
            continue
        if any(type(value) is str and other[key] != value for key, value in config.items()):
            continue
        if step["bottleneck"] not in plan.op_name:
            plan.fail("trace", f"trace[{k}]: no op is named {step['bottleneck']!r}")
        total = fixed + _round_up(step["peak_bytes"], page)
        if step["total_bytes"] != total:
            plan.fail(
                "trace", f"trace[{k}].total_bytes is {step['total_bytes']}, fixed bytes and its peak give {total}"
            )
        if other == config:
            repeated = (step["peak_bytes"], step["predicted_ms"])
            expected = (document["lower_bound_bytes"], document["predicted_step_ms"])
            if repeated != expected:
                plan.fail("trace", f"trace[{k}] has the plan's configuration and {repeated}, the plan {expected}")
