"""A plan by columns, indexed by buffer id or op index, with the values that the checks derive.

A loop over 500 rows of 17 fields would take half of a check's time. The `Skeleton` has what no dim changes: what is derived of
it holds for every plan that has it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

FULL_STEP: Final = "full_step"  # the phase whose dims are known by name
MAIN: Final = "main"
HOST: Final = "host"
EXTERNAL: Final = "external"  # the one pool that the plan does not place page by page
POOLS: Final = frozenset({"workspace", "weights", HOST, EXTERNAL})  # beside those of states and carries
KNOWN_POOLS: Final = ", ".join(sorted({*POOLS, "carry/NAME", "state/NAME"}))
COMPONENTS: Final = ("context", "library", "weights", "state", "workspace")
FROM_START: Final = frozenset({"input", "weight", "state", "external"})  # these hold a value before op 0
TO_END: Final = frozenset({"output", "weight", "state", "external"})  # these hold a value after the last op
KINDS: Final = FROM_START | TO_END | {"carry", "transient", "scratch", "host"}
ITEM_BYTES: Final = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "float32": 4, "int64": 8, "float64": 8,
}  # fmt: skip

Ids = Sequence[int]
Gaps = Mapping[int, Sequence[Sequence[int]]]  # root -> intervals in which it holds no value, in order
Marks = Mapping[int, int]  # buffer -> bit set of op indices


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


class Region(NamedTuple):
    """A chunk loop over ops [start, end)."""

    name: str
    knob: str
    dim: str
    start: int
    end: int
    parent: str | None


class Loop(NamedTuple):
    """How often a region runs: `num_chunks` chunks of `rows` cover `extent`."""

    extent: int
    rows: int
    num_chunks: int

    @property
    def full(self) -> int:
        """Rows of a full iteration: a loop of side ops that runs once may name more rows than there are."""
        return min(self.rows, self.extent)


class Barrier(NamedTuple):
    """The buffers that a region, or an explicit barrier (`region` None), claims to keep alive over [start, end)."""

    name: str
    region: str | None
    start: int
    end: int
    inputs: Ids
    outputs: Ids
    carried: Ids


class Cut(NamedTuple):
    """A slice whose names are sound: op `op` sees rows of an axis of buffer `b`, by a loop inside of which `b` may be."""

    op: int
    b: int
    axis: int
    region: str
    factor: int
    inside: bool


@dataclass(slots=True, kw_only=True)
class Skeleton:
    """The part of a plan that dims do not change, by columns, and the values that the checks derive from it alone.

    The fields under "derived" are filled in the order of the checks: regions, lifetimes, pools, values, streams.
    """

    found: list[Violation]
    regions: Mapping[str, Region]
    barriers: Sequence[Barrier]
    edges: Sequence[tuple[str, int, int]]
    # ops
    op_name: Sequence[str]
    kernel: Sequence[str]
    stream: Sequence[str]
    op_region: Sequence[str | None]
    reads: Sequence[Ids]
    writes: Sequence[Ids]
    operands: Sequence[dict[str, int]]
    attrs: Sequence[dict[str, Any]]
    inplace: Sequence[Sequence[Sequence[int]]]
    slices: Sequence[Sequence[tuple[str, int, str, int]]]
    # buffers
    name: Sequence[str]
    kind: Sequence[str]
    pool: Sequence[str]
    claimed_start: Sequence[int]
    claimed_end: Sequence[int]
    gaps: Sequence[Sequence[Sequence[int]]]
    alias_of: Sequence[int | None]
    dtype: Sequence[str]
    alignment: Sequence[int]
    home: Sequence[str | None]
    tensor: Sequence[str | None]
    rotate: Sequence[int]
    # derived: region -> itself and those around it, innermost first; slices of sound names, ops with others
    enclosing: dict[str, tuple[str, ...]] = field(default_factory=dict)
    cuts: list[Cut] = field(default_factory=list)
    odd_cuts: set[int] = field(default_factory=set)
    # derived: lifetimes, what barriers and side streams hold, a root's aliases and the lifetime of its own value
    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    windows: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    members: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    own: dict[int, tuple[int, int]] = field(default_factory=dict)
    # derived: bytes of one element of all slots, and of the alignment of all; pool -> buffers, without aliases
    item_bytes: list[int] = field(default_factory=list)
    slot_units: list[int] = field(default_factory=list)
    located: dict[str, list[int]] = field(default_factory=dict)
    roots: dict[str, list[int]] = field(default_factory=dict)
    # derived: (op, buffer, for each write before it the loops around both of which it sees other slices): read too early
    # where each of them has a loop that runs more than once
    fills: list[tuple[int, int, list[frozenset[str]]]] = field(default_factory=list)
    # derived: gaps that hold no value; root -> bit set of the ops at which it is live
    holes: Gaps = field(default_factory=dict)
    live: Marks = field(default_factory=dict)
    # derived, of side streams: (side op, loop, buffer) beside whose iterations others run; (writer, buffer, buffer of its
    # group, other op) in no order; per buffer the bit sets of ops that touch it, and of those in no order with them
    beside: list[tuple[int, str, int]] = field(default_factory=list)
    rivals: list[tuple[int, int, int, int]] = field(default_factory=list)
    touched: Marks = field(default_factory=dict)
    clash: Marks = field(default_factory=dict)
    # known: root -> how its aliases may lie to each other, as far as that was asked
    legal: dict[int, set[tuple[Any, ...]]] = field(default_factory=lambda: defaultdict(set))

    @property
    def has_side_streams(self) -> bool:
        """Whether any op runs beside the main stream."""
        return not {MAIN}.issuperset(self.stream)

    def fail(self, code: str, message: str, buffers: Iterable[int] = (), ops: Iterable[int] = ()) -> None:
        """Record a violation."""
        self.found.append(Violation(code=code, message=message, buffers=tuple(buffers), ops=tuple(ops)))

    def say(self, b: int) -> str:
        """Name a buffer for a message."""
        return f"buffer {b} '{self.name[b]}'"

    def say_op(self, i: int) -> str:
        """Name an op for a message."""
        return f"op {i} '{self.op_name[i]}'"

    def around(self, i: int) -> tuple[str, ...]:
        """Return the regions around an op, innermost first."""
        region = self.op_region[i]
        return self.enclosing[region] if region is not None else ()

    def is_within(self, home: str | None, region: str) -> bool:
        """Return whether a home is the region or nested in it."""
        return home is not None and region in self.enclosing[home]

    def group(self, root: int) -> list[int]:
        """Return a root and its aliases."""
        return [root, *self.members.get(root, ())]

    def group_of(self, b: int) -> list[int]:
        """Return all that share a root with a buffer."""
        root = self.alias_of[b]
        return self.group(b if root is None else root)


@dataclass(slots=True, kw_only=True)
class Columns(Skeleton):
    """A whole plan by columns: a skeleton and its numbers.

    `header` is what a document holds besides its lists of rows.
    """

    header: Mapping[str, Any]
    pools: Mapping[str, int]
    loops: Mapping[str, Loop]
    offset: Sequence[int]
    size: Sequence[int]
    alias_offset: Sequence[int]
    shape: Sequence[Sequence[int]]
    # derived: product(shape) x itemsize x slots; offset + size; pool -> its highest end; ops whose slices do not fit
    raw_bytes: list[int] = field(default_factory=list)
    top: list[int] = field(default_factory=list)
    reach: dict[str, int] = field(default_factory=dict)
    uncut: set[int] = field(default_factory=set)

    def share_bytes(self, a: int, b: int) -> bool:
        """Return whether two members of an alias group overlap in bytes of their own; a root's size covers its aliases too."""
        at, raw = self.alias_offset, self.raw_bytes
        return at[a] < at[b] + raw[b] and at[b] < at[a] + raw[a] and raw[a] > 0 and raw[b] > 0


def owner_of(pool: str) -> tuple[str, str] | None:
    """Return the kind and name of the state or carry whose own pool this is, or None.

    Examples
    --------
    >>> owner_of("state/kv"), owner_of("carry/kept"), owner_of("workspace")
    (('state', 'kv'), ('carry', 'kept'), None)
    """
    kind, slash, name = pool.partition("/")
    return (kind, name) if slash and name and kind in ("state", "carry") else None


def is_known_pool(pool: str) -> bool:
    """Return whether a plan may have a pool of this name: one of `POOLS`, or that of a state or a carry.

    Examples
    --------
    >>> is_known_pool("host"), is_known_pool("state/kv"), is_known_pool("state")
    (True, True, False)
    """
    return pool in POOLS or owner_of(pool) is not None


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple that is not below a value.

    Examples
    --------
    >>> round_up(513, 512)
    1024
    """
    return -(-value // multiple) * multiple
