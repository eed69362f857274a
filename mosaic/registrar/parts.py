"""The records of a graph: dims, regions, buffers, ops, barriers, edges and choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from mosaic.registrar.operator import Dim, Operator, Rate, Spec
from mosaic.registrar.polynomial import Polynomial

Kind: TypeAlias = Literal["weight", "state", "carry", "transient", "scratch", "input", "output", "host", "external"]

MAIN: Final = "main"
ALIGNMENT: Final = 512
"""Bytes that every offset is a multiple of."""
OWN_POOL: Final = frozenset({"state", "carry"})
"""Kinds that outlive a step: each buffer has a pool of its own, so that it has one address in all plans."""
POOL: Final[Mapping[str, str]] = {"weight": "weights", "host": "host", "external": "external"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DimInfo:
    """A symbolic dim: its upper bound by another dim, or its fixed value."""

    symbol: Polynomial
    at_most: str | None = None
    value: int | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Region:
    """A run of ops [start, end) executed over slices of `over`; `rows` is the slice's symbol, shared by its knob.

    `end` is set when the `chunk` block closes.
    """

    name: str
    knob: str
    over: Polynomial
    rows: Polynomial
    parent: Region | None
    start: int
    end: int = -1

    @property
    def chain(self) -> tuple[Region, ...]:
        """This region and its enclosing regions, outermost first."""
        return (self,) if self.parent is None else (*self.parent.chain, self)

    def encloses(self, other: Region | None) -> bool:
        """Return whether `other` is this region or nested in it."""
        return other is not None and self in other.chain


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Buffer:
    """Bytes that the plan will place; `home` is the region in whose body it was created."""

    id: int
    name: str
    kind: Kind
    spec: Spec
    home: Region | None = None
    tensor: str | None = None
    rotate: int = 1
    source: str = ""

    @property
    def pool(self) -> str:
        """The pool that holds it: weights, host, external, its own (`state/NAME`, `carry/NAME`), or the workspace."""
        return f"{self.kind}/{self.name}" if self.kind in OWN_POOL else POOL.get(self.kind, "workspace")

    @property
    def is_shared(self) -> bool:
        """Whether all graphs of a program have it: a weight, in host memory too, or a state."""
        return self.kind in ("weight", "state") or (self.kind == "host" and self.tensor is not None)

    @property
    def shape(self) -> tuple[Dim, ...]:
        """Sizes of the axes."""
        return self.spec.shape

    @property
    def dtype(self) -> str:
        """Type of the elements."""
        return self.spec.dtype

    @property
    def bytes(self) -> Dim:
        """Bytes of the buffer, all rotating slots together."""
        return self.spec.bytes * self.rotate

    def __str__(self) -> str:
        return f"{self.name}: {self.spec}"


@dataclass(frozen=True, slots=True)
class Slice:
    """Iteration i of `region` sees `factor` x rows of one axis of one operand."""

    operand: str
    axis: int
    region: str
    factor: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Op:
    """One launch: an operator bound to buffers; `inplace` are the pairs (write, read) that may share storage here."""

    index: int
    name: str
    operator: Operator
    operands: Mapping[str, Buffer]
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    attrs: Mapping[str, Any]
    region: Region | None
    stream: str
    slices: tuple[Slice, ...]
    inplace: tuple[tuple[str, str], ...]
    flops: Dim
    bytes: Dim
    rate: Rate
    rate_rows: Dim
    rate_columns: Dim
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Barrier:
    """The listed buffers live through [start, end) at least; `start` None means from their own first access."""

    name: str
    buffers: tuple[Buffer, ...]
    start: int | None
    end: int
    source: str


@dataclass(frozen=True, slots=True)
class Edge:
    """An ordering between streams: `fork` (a side op waits for a main op) or `wait` (a main op waits for a side op)."""

    kind: Literal["fork", "wait"]
    source: int
    target: int


class Run(NamedTuple):
    """Layers of one kind, of which a brief graph registers the first three: the third stands for `more` further ones.

    `ends` are the numbers of ops, buffers, regions, barriers and edges after each of the three.
    """

    ends: Sequence[tuple[int, ...]]
    more: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A knob that selects which ops the model registers; the planner considers every option.

    In an `escalating` choice each option needs no more device memory than the one before it, more host memory, and is
    no faster: the planner takes the first that fits. Options that are not `alike` round differently.
    """

    name: str
    options: tuple[str, ...]
    value: str
    escalating: bool = False
    alike: bool = True
