"""One registration of a model, compiled: ops, buffers and regions as plain records, and their sizes as rows of a table."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mosaic.registrar.operator import Operator

__all__ = [
    "Access", "Body", "BufferRecord", "ChoiceRecord", "DimRecord", "KnobRecord", "OpRecord", "RegionRecord",
]  # fmt: skip

_FROM_START = frozenset({"input", "weight", "state", "external"})
_TO_END = frozenset({"output", "weight", "state", "external"})


class DimRecord(NamedTuple):
    """A symbolic dim: bounded by another one, or fixed."""

    name: str
    at_most: str | None
    value: int | None


class KnobRecord(NamedTuple):
    """A chunk knob: rows per chunk of the dim `over`, a multiple of `tile`."""

    name: str
    over: str
    tile: int


class OpRecord(NamedTuple):
    """One launch; reads, writes and operands are buffer ids, `flops` to `rate_columns` rows of the polynomial table.

    `ways` names the implementations that the backend has; `rate` is the rate of a single one, else the operator's. Records have
    no lists, which the cycle collector would visit: there are tens of thousands.
    """

    name: str
    kernel: str
    stream: str
    region: int | None
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    updates: tuple[int, ...]
    operands: dict[str, int]
    attrs: dict[str, Any]
    inplace: tuple[tuple[int, ...], ...]
    slices: tuple[tuple[Any, ...], ...]
    rate: str
    flops: int
    bytes: int
    rate_rows: int
    rate_columns: int
    ways: tuple[str, ...]


class BufferRecord(NamedTuple):
    """One buffer; `shape` and `bytes` (of one slot) are rows of the polynomial table."""

    name: str
    kind: str
    pool: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    home: int | None
    tensor: str | None
    rotate: int
    alias_of: int | None
    alias_offset: int


class ChoiceRecord(NamedTuple):
    """A choice: its options, and whether each needs less device memory, and no less time, than the one before."""

    name: str
    options: tuple[str, ...]
    escalating: bool
    unlike: bool


class Access(NamedTuple):
    """One op's touch of a buffer."""

    op: int
    read: bool
    write: bool


class RegionRecord(NamedTuple):
    """A chunk region over ops [start, end)."""

    name: str
    knob: str
    dim: str
    parent: int | None
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Body:
    """One registration of the model, compiled.

    `exponents` [monomials, variables] and `coefficients` [polynomials, monomials] hold every symbolic quantity;
    variables are the dims, then one `<knob>_rows` per knob. `factors` is `factor_columns` of the exponents. `operators`
    are the operators of its ops that Mosaic does not ship.
    """

    variables: tuple[str, ...]
    exponents: npt.NDArray[np.int64]
    coefficients: npt.NDArray[np.int64]
    denominators: npt.NDArray[np.int64]
    ops: tuple[OpRecord, ...]
    buffers: tuple[BufferRecord, ...]
    regions: tuple[RegionRecord, ...]
    barriers: tuple[tuple[str, list[int], int | None, int], ...]
    edges: tuple[tuple[str, int, int], ...]
    factors: npt.NDArray[np.int64]
    operators: Mapping[str, Operator] = field(default_factory=dict)

    @cached_property
    def accesses(self) -> list[list[Access]]:
        """The touches of every buffer, in program order."""
        found: list[list[Access]] = [[] for _ in self.buffers]
        for index, op in enumerate(self.ops):
            read = set(op.reads)
            for b in op.reads:
                found[b].append(Access(index, True, b in op.writes))
            for b in op.writes:
                if b not in read:
                    found[b].append(Access(index, False, True))
        return found

    @cached_property
    def intervals(self) -> tuple[list[int], list[int]]:
        """First access and last + 1 of every buffer, before extension by loops, barriers and streams."""
        num_ops = len(self.ops)
        starts, ends = [], []
        for buffer, seen in zip(self.buffers, self.accesses, strict=True):
            constant = buffer.kind == "host" and (seen[0].read if seen else buffer.tensor is not None)
            carry = buffer.kind == "carry"
            taken, handed = carry and any(a.read for a in seen[:1]), carry and any(a.write for a in seen)
            starts.append(0 if buffer.kind in _FROM_START or constant or taken or not seen else seen[0].op)
            ends.append(num_ops if buffer.kind in _TO_END or constant or handed else (seen[-1].op + 1 if seen else 1))
        return starts, ends

    @cached_property
    def touched(self) -> list[list[tuple[int, bool]]]:
        """The buffers that the ops of every region touch, ascending, and whether any of them writes it."""
        found = []
        for region in self.regions:
            writes: dict[int, bool] = {}
            for op in self.ops[region.start : region.end]:
                for b in op.reads:
                    writes.setdefault(b, False)
                for b in op.writes:
                    writes[b] = True
            found.append(sorted(writes.items()))
        return found

    @cached_property
    def side_windows(self) -> list[tuple[int | None, int, int, list[int]]]:
        """For every side op: its region, the ops from fork to join, [start, end), and the buffers that it touches."""
        fork_at = {target: source for kind, source, target in self.edges if kind == "fork"}
        joins = defaultdict[str, list[tuple[int, int]]](list)
        for source, target in sorted((source, target) for kind, source, target in self.edges if kind == "wait"):
            joins[self.ops[source].stream].append((source, target))
        forks: dict[str, int] = {}
        found = []
        for index, op in enumerate(self.ops):
            if op.stream == "main":
                continue
            forks[op.stream] = fork_at.get(index, forks.get(op.stream, -1))
            following = bisect_left(joins[op.stream], (index,))
            end = joins[op.stream][following][1] if following < len(joins[op.stream]) else len(self.ops)
            found.append((op.region, forks[op.stream] + 1, end, [*dict.fromkeys((*op.reads, *op.writes))]))
        return found

    @cached_property
    def groups(self) -> list[tuple[int, list[int]]]:
        """Every root of the workspace, ascending, with the buffers in its storage, itself first."""
        members = {b: [b] for b, r in enumerate(self.buffers) if r.alias_of is None and r.pool == "workspace"}
        for b, buffer in enumerate(self.buffers):
            if buffer.alias_of in members:
                members[buffer.alias_of].append(b)
        return list(members.items())

    @cached_property
    def reused(self) -> list[tuple[int, list[int]]]:
        """The `groups` that may hold no value for a while: several buffers, or one that is fully overwritten."""
        return [
            (root, members)
            for root, members in self.groups
            if len(members) > 1 or sum(not access.read for access in self.accesses[root]) > 1
        ]

    @cached_property
    def size_classes(self) -> tuple[list[int], list[tuple[tuple[int, int, int], ...]]]:
        """The size class of every root of the workspace, and of every class its members: rows of the polynomial table for
        bytes of one slot and alias offset, and the slots."""
        sizes = [(b.bytes, b.alias_offset, b.rotate) for b in self.buffers]
        keys = [tuple(sorted({sizes[member] for member in members})) for _, members in self.groups]
        class_of = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        return [class_of[key] for key in keys], list(class_of)

    @cached_property
    def dtype(self) -> str:
        """The dtype of most weights, streamed and adopted ones too; the first of equals, float32 without weights."""
        counts = Counter(b.dtype for b in self.buffers if b.kind == "weight" or b.tensor is not None)
        return max(counts, key=counts.__getitem__, default="float32")

    @cached_property
    def has_streams(self) -> bool:
        """Whether some ops run beside the main stream."""
        return any(op.stream != "main" for op in self.ops)

    @cached_property
    def knobs(self) -> frozenset[str]:
        """Knobs that have a region here."""
        return frozenset(region.knob for region in self.regions)

    @cached_property
    def looping(self) -> frozenset[str]:
        """Knobs with a region that holds side ops, which are never off: iterations overlap by rotating buffers."""
        return frozenset(
            self.regions[op.region].knob for op in self.ops if op.stream != "main" and op.region is not None
        )

    def evaluate(self, values: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return every polynomial at the given variables, exact in 64 bits; fractions are floored."""
        return (self.coefficients @ self.monomials(values)) // self.denominators

    def monomials(self, values: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the values of the monomials: a gather of their factors, multiplied."""
        gathered = np.array([*values, 1], dtype=np.int64)[self.factors]
        products: npt.NDArray[np.int64] = gathered[0] if len(gathered) == 1 else np.multiply.reduce(gathered, axis=0)
        return products
