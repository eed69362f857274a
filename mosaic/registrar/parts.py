"""The records of a graph: dims, regions, buffers, ops, barriers, edges and choices.

The reads, writes and costs of an op are functions of symbolic sizes alone. Layers repeat the same computations, as do the
graphs of other choices; symbolic arithmetic is slow, so results are cached. Equal results are one object, so that looking
them up again compares identities.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from mosaic.errors import GraphError
from mosaic.registrar.operator import Dim, Operator, Rate, Spec, Work
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


def caller() -> str:
    """Return `file:line` of the registering code: the first frame outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("mosaic.registrar", "contextlib")
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"


# -- what an op reads, writes and costs, as functions of symbolic sizes alone --------------------------------------------

_KEPT: Final = 4096
"""Results that each computation caches, for layers and graphs that repeat it."""


Loops: TypeAlias = tuple[tuple[Polynomial, Polynomial], ...]
"""For nested regions, outermost first: the dim of each, and the rows of one iteration."""
Seen: TypeAlias = tuple[tuple[str, Spec, int], ...]
"""Operands: name, spec, and the number of open loops that hold its home."""
Specs: TypeAlias = tuple[tuple[str, Spec], ...]
Attributes: TypeAlias = tuple[tuple[str, Any], ...]
Cut: TypeAlias = tuple[str, int, int, int | None, Dim]
"""One slicing of an operand: its name, axis, loop, factor (none: the axis cannot be sliced) and the sliced dim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The reads of one launch in one iteration of the open loops, and its work; or, in `refused`, why there is none."""

    specs: Specs
    cuts: tuple[Cut, ...]
    work: Work | None
    refused: str = ""


@lru_cache(maxsize=_KEPT)
def asked(rule: Operator, reads: Seen, loops: Loops, attrs: Attributes) -> Asked:
    """Return the reads of a launch, and the operator's work for them."""
    specs, cuts = _iteration(rule, reads, loops)
    if any(factor is None for *_, factor, _ in cuts):
        return Asked(specs=specs, cuts=cuts, work=None)
    try:
        return Asked(specs=specs, cuts=cuts, work=rule.work(**dict(specs), **dict(attrs)))
    except GraphError as error:
        shown = ", ".join(f"{key} {spec}" for key, spec in specs)
        return Asked(specs=specs, cuts=cuts, work=None, refused=f"{rule.name}({shown}): {error}")


@dataclass(frozen=True, slots=True)
class Results:
    """The writes of one launch in one iteration, and its scratch bytes."""

    scratch: Dim
    cuts: tuple[Cut, ...]


@lru_cache(maxsize=_KEPT)
def results(backend: str, rule: Operator, reads: Specs, writes: Seen, loops: Loops, attrs: Attributes) -> Results:
    """Return the writes of a launch, and its scratch."""
    specs, cuts = _iteration(rule, writes, loops)
    scratch = rule.scratch_bytes(backend, dict(reads + specs), dict(attrs))
    if scratch != 0:
        cuts += _iteration(rule, (("scratch", Spec((scratch,), "uint8"), len(loops)),), loops)[1]
    return Results(scratch, cuts)


def _iteration(rule: Operator, operands: Seen, loops: Loops) -> tuple[Specs, tuple[Cut, ...]]:
    """Operands as one iteration of some nested loops sees them, and their slices."""
    views = {key: view(spec, loops, inside, key in rule.whole) for key, spec, inside in operands}
    return (
        tuple((key, found.seen) for key, found in views.items()),
        tuple((key, *cut) for key, found in views.items() for cut in found.cuts),
    )


@dataclass(frozen=True, slots=True)
class View:
    """An operand as one iteration of some nested loops sees it, and its slices: axis, loop, factor (none: the axis
    cannot be sliced) and the sliced dim."""

    seen: Spec
    cuts: tuple[tuple[int, int, int | None, Dim], ...]


@lru_cache(maxsize=_KEPT)
def view(spec: Spec, loops: Loops, inside: int, whole: bool) -> View:
    """Return an operand as an iteration sees it: loops inside its home slice it, unless the operator takes it whole.

    Its home lies in the outermost `inside` loops.
    """
    cuts: list[tuple[int, int, int | None, Dim]] = []
    shape = spec.shape
    for index, (over, rows) in enumerate(loops):
        outside = index >= inside
        if whole and outside:
            break
        for axis, dim in enumerate(shape):
            factor = _factor(dim, over if outside else rows)
            if factor is not None or (outside and isinstance(dim, Polynomial) and str(over) in dim.names):
                cuts.append((axis, index, factor, dim))
        if outside:
            shape = tuple(dim if isinstance(dim, int) else dim.at({str(over): rows}) for dim in shape)
    return View(Spec(shape, spec.dtype), tuple(cuts))


def _factor(dim: Dim, of: Polynomial) -> int | None:
    """The integer f with dim == f * of, if there is one."""
    factor = dim / of if isinstance(dim, Polynomial) else None
    return factor if isinstance(factor, int) else None
