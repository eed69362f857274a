"""The contents of a plan's document as typed records, for code that runs, draws or reports a plan.

The checker reads documents by itself (`check/reading.py`): it must not trust the planner's code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias

from mosaic.registrar.dtypes import ITEMSIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPool:
    """Memory that buffers lie in: `capacity` bytes, whole pages."""

    name: str
    device: str
    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBuffer:
    """Bytes that the plan places, `offset` bytes into `pool`; alive over the ops [start, end) except in `gaps`.

    An alias (`alias_of` is the id of another buffer) lies `alias_offset` bytes after the start of its root. `size`
    covers all slots of a rotating buffer, and all members of a root's group. `region` is the loop of its home.
    """

    id: int
    name: str
    kind: str
    pool: str
    start: int
    end: int
    gaps: Sequence[Sequence[int]]
    alias_of: int | None
    dtype: str
    alignment: int
    region: str | None
    tensor: str | None
    rotate: int
    offset: int
    size: int
    alias_offset: int
    shape: Sequence[int]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: one index of the first axis."""
        return math.prod(self.shape[1:]) * ITEMSIZE[self.dtype]

    @property
    def value_bytes(self) -> int:
        """Bytes of its value, in one slot: `size` without rounding."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def holds_weight(self) -> bool:
        """Whether it is a weight, on the device or in host memory, and no alias."""
        in_host = self.kind == "host" and self.tensor is not None
        return self.alias_of is None and (self.kind == "weight" or in_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOp:
    """One launch: its operator's name (`kernel`), operand names with buffer ids, and how loops slice operands.

    A slice (operand's buffer, axis, region, factor) says that iteration i sees `factor` times its rows of the axis.
    """

    index: int
    name: str
    kernel: str
    stream: str
    region: str | None
    reads: Sequence[int]
    writes: Sequence[int]
    operands: Mapping[str, int]
    attrs: Mapping[str, Any]
    inplace: Sequence[Sequence[Any]]
    slices: Sequence[Sequence[Any]]
    flops: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRegion:
    """A loop over the ops [start, end): `count` iterations of `rows` rows of `dim`, which has `extent` of them."""

    name: str
    knob: str
    dim: str
    extent: int
    rows: int
    count: int
    start: int
    end: int
    parent: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBarrier:
    """Buffers held over the ops [start, end): `inputs` to the end, `outputs` from the start, `carried` throughout."""

    name: str
    region: str | None
    start: int
    end: int
    inputs: Sequence[int]
    outputs: Sequence[int]
    carried: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEdge:
    """The op `target` starts after the op `source` has ended, on whatever streams."""

    kind: str
    source: int
    target: int


class PlanRecords:
    """A plan's lists of rows, each read once; figures of the whole plan are properties of `Plan`.

    Parameters
    ----------
    document
        The JSON form.

    Examples
    --------
    >>> from mosaic.planner import plan
    >>> records = plan("llada-8b", tokens=4096, device="h200").records
    >>> records.peak_bytes == max(b.offset + b.size for b in records.buffers if b.pool == "workspace")
    True
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document

    @property
    def backend(self) -> str:
        """ "cpu" or "cuda"."""
        return str(self.document["backend"])

    @property
    def peak_bytes(self) -> int:
        """Highest address in use in the workspace."""
        return int(self.document["peak_bytes"])

    @property
    def implementations(self) -> Mapping[str, str]:
        """The implementation of each operator that has several."""
        found: Mapping[str, str] = self.document["implementations"]
        return found

    @cached_property
    def pools(self) -> tuple[PlanPool, ...]:
        """The pools, workspace first."""
        return tuple(PlanPool(**row) for row in self.document["pools"])

    @cached_property
    def buffers(self) -> tuple[PlanBuffer, ...]:
        """The buffers by id."""
        return tuple(PlanBuffer(**row) for row in self.document["buffers"])

    @cached_property
    def ops(self) -> tuple[PlanOp, ...]:
        """The ops by index."""
        return tuple(PlanOp(**row) for row in self.document["ops"])

    @cached_property
    def regions(self) -> tuple[PlanRegion, ...]:
        """The loops that are on."""
        return tuple(PlanRegion(**row) for row in self.document["regions"])

    @cached_property
    def barriers(self) -> tuple[PlanBarrier, ...]:
        """The barriers."""
        return tuple(PlanBarrier(**row) for row in self.document["barriers"])

    @cached_property
    def edges(self) -> tuple[PlanEdge, ...]:
        """The edges that order ops of different streams."""
        return tuple(PlanEdge(kind=row["kind"], source=row["from"], target=row["to"]) for row in self.document["edges"])

    @cached_property
    def taken(self) -> Mapping[str, int]:
        """Bytes, by name, of carries that are read before they are written: their values come from an earlier step."""
        carries = {b.id: b for b in self.buffers if b.kind == "carry"}
        touched: set[int] = set()
        found: dict[str, int] = {}
        for op in self.ops:
            found |= {carries[b].name: carries[b].value_bytes for b in op.reads if b in carries and b not in touched}
            touched |= {*op.reads, *op.writes}
        return found

    @cached_property
    def held(self) -> Mapping[str, int]:
        """Bytes of the values of states and carries, by pool."""
        return {b.pool: b.value_bytes for b in self.buffers if b.kind in ("state", "carry")}

    @cached_property
    def held_states(self) -> Mapping[str, int]:
        """Bytes of the values of states, by pool."""
        return {b.pool: b.value_bytes for b in self.buffers if b.kind == "state"}

    def pool(self, name: str) -> PlanPool:
        """Return the pool of this name."""
        return next(pool for pool in self.pools if pool.name == name)

    def root(self, buffer: PlanBuffer) -> PlanBuffer:
        """Return the buffer whose bytes a buffer has: its root, or itself if it is no alias."""
        while buffer.alias_of is not None:
            buffer = self.buffers[buffer.alias_of]
        return buffer


class HasRecords(Protocol):
    """An object with records: a `Plan`."""

    @property
    def records(self) -> PlanRecords:
        """The records of its document."""


AnyPlan: TypeAlias = HasRecords | Mapping[str, Any] | PlanRecords
"""A plan, its document, or its records."""


def records_in(plan: AnyPlan) -> PlanRecords:
    """Return the records of a plan, or of a plan's document."""
    if isinstance(plan, PlanRecords):
        return plan
    return PlanRecords(plan) if isinstance(plan, Mapping) else plan.records
