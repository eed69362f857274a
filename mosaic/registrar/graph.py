"""The graph of one forward phase: ops in program order, symbolic dims, no numbers.

A model is described, not traced. `add_op` infers shapes from operators and
refuses a mismatch on the line that wrote it; `chunk` opens a loop whose body
is laid out once; `add_alias`, `add_barrier` and `stream` state what lifetimes
cannot derive. Nothing here imports torch or knows a device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final, Literal, TypeAlias, TypeGuard

import sympy

from mosaic.errors import GraphError, MissingExtra
from mosaic.registrar.dtypes import ITEMSIZE
from mosaic.registrar.operator import Dim, Operator, Rate, Spec, divides, require
from mosaic.registrar.operators import operator as shipped

__all__ = ["Barrier", "Buffer", "Choice", "DimInfo", "Edge", "Graph", "Kind", "Op", "Region", "Slice"]

Kind: TypeAlias = Literal["weight", "state", "carry", "transient", "scratch", "input", "output", "host", "external"]

MAIN: Final = "main"
ALIGNMENT: Final = 512
"""Bytes that every offset is a multiple of."""
SHARED: Final = frozenset({"weight", "state", "carry"})
POOL: Final[Mapping[str, str]] = {"weight": "weights", "host": "host", "external": "external"}
_KEPT: Final = 4096
"""Results that each symbolic computation keeps, for the layers and graphs that repeat it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DimInfo:
    """A symbolic dim: its upper bound by another dim, or its fixed value."""

    symbol: sympy.Symbol
    at_most: str | None = None
    value: int | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Region:
    """A run of ops [start, end) executed over slices of `over`; `rows` is the slice's symbol, shared by its knob.

    `end` is set when the `chunk` block closes.
    """

    name: str
    knob: str
    over: sympy.Symbol
    rows: sympy.Symbol
    parent: Region | None
    start: int
    end: int = -1

    @property
    def chain(self) -> tuple[Region, ...]:
        """This region and those around it, outermost first."""
        return (self,) if self.parent is None else (*self.parent.chain, self)

    def encloses(self, other: Region | None) -> bool:
        """Whether `other` is this region or nested in it."""
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
        """The pool that holds it: weights, host, external, a state's own (`state/NAME`), or the workspace."""
        return f"state/{self.name}" if self.kind == "state" else POOL.get(self.kind, "workspace")

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


@dataclass(frozen=True, slots=True)
class Choice:
    """A knob whose value selects what the model registers; the planner tries every option.

    Of an `escalating` one, each option needs no more device memory than the one before it, more of the host's, and is
    no faster: the planner takes the first that fits.
    """

    name: str
    options: tuple[str, ...]
    value: str
    escalating: bool = False


@dataclass(slots=True)
class _SideStream:
    name: str
    forked_after: int
    first: int | None = None
    last: int | None = None


class Graph:
    """A parameterised template of one forward phase.

    Parameters
    ----------
    name
        The phase, such as `full_step`.
    backend
        Whose implementations declare scratch bytes: `cuda` or `cpu`.
    choices
        Values of the choices to register with; the first option where absent.

    Examples
    --------
    >>> g = Graph("toy")
    >>> tokens = g.dim("tokens")
    >>> x = g.input("x", (tokens, 64), "float32")
    >>> w = g.weight("w", (256, 64), "float32")
    >>> with g.chunk("ffn", over=tokens):
    ...     h = g.add_op("linear", x, w, name="up")
    >>> h.spec.shape
    (ffn_rows, 256)
    """

    def __init__(self, name: str, *, backend: str = "cuda", choices: Mapping[str, str] | None = None) -> None:
        self.name, self.backend = name, backend
        self.dims: dict[str, DimInfo] = {}
        self.buffers: list[Buffer] = []
        self.ops: list[Op] = []
        self.operators: dict[str, Operator] = {}
        self.regions: list[Region] = []
        self.barriers: list[Barrier] = []
        self.edges: list[Edge] = []
        self.aliases: dict[int, tuple[Buffer, Dim]] = {}
        self.choices: dict[str, Choice] = {}
        self.tiles: dict[str, int] = {}
        self.knob_dims: dict[str, sympy.Symbol] = {}
        self._given = dict(choices or {})
        self._names: dict[str, Buffer] = {}
        self._op_names: set[str] = set()
        self._region_names: set[str] = set()
        self._last_main = -1
        self._scope: list[str] = []
        self._part = ""
        self._enter(None)
        self._stream: _SideStream | None = None
        self._side: dict[str, _SideStream] = {}
        self._waits: list[int] = []
        self._sizes: set[sympy.Expr] = set()

    # -- dims, knobs, names -------------------------------------------------------------------------------------

    def dim(self, name: str, *, at_most: str | None = None, value: int | None = None) -> sympy.Symbol:
        """Declare (or fetch) a symbolic dim; `at_most` bounds it by another dim, `value` fixes it.

        Raises
        ------
        GraphError
            A bound by an undeclared dim, or a bound or value other than the one declared before.
        """
        if at_most is not None and at_most not in self.dims:
            raise GraphError(f"dim '{name}' ({_caller()}): bounded by '{at_most}', which is not declared yet")
        known = self.dims.get(name)
        if name.removesuffix("_rows") in self.tiles and name.endswith("_rows"):
            raise GraphError(
                f"dim '{name}' ({_caller()}): the rows of the chunk knob '{name.removesuffix('_rows')}' are called so"
            )
        if known is None:
            symbol = _symbol(name)
        else:
            symbol = known.symbol
            for what, old, new in (("at_most", known.at_most, at_most), ("value", known.value, value)):
                if old is not None and new is not None and old != new:
                    raise GraphError(f"dim '{name}' ({_caller()}): asked for {what}={new}, declared with {what}={old}")
            at_most, value = at_most or known.at_most, value or known.value
        self.dims[name] = DimInfo(symbol=symbol, at_most=at_most, value=value)
        return symbol

    def choice(self, name: str, options: Sequence[str], *, escalating: bool = False) -> str:
        """Declare a knob that selects what is registered, and return the value of this registration."""
        value = self._given.get(name, options[0])
        require(value in options, f"choice '{name}' ({_caller()}) is one of {', '.join(options)}, got '{value}'")
        self.choices[name] = Choice(name, tuple(options), value, escalating)
        return value

    def knob(self, name: str, *, over: sympy.Symbol, tile: int = 128) -> None:
        """Declare a chunk knob ahead of its regions, for knobs that only some choices use.

        Raises
        ------
        GraphError
            As for `chunk`.
        """
        self._check_knob(name, over, tile, _caller())
        self.tiles[name] = tile
        self.knob_dims[name] = over

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names registered inside with `name/`."""
        self._scope.append(name)
        try:
            yield
        finally:
            self._scope.pop()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Register one phase of a joined step: its ops and its own buffers are prefixed, weights, state and carries shared."""
        outer, self._part = self._part, name
        try:
            yield
        finally:
            self._part = outer

    def _full(self, name: str, *, shared: bool = False) -> str:
        prefix = [self._part] if self._part and not shared else []
        return "/".join([*prefix, *self._scope, name])

    # -- buffers ------------------------------------------------------------------------------------------------

    def buffer(
        self,
        name: str,
        shape: Sequence[Dim],
        dtype: str,
        *,
        kind: Kind = "transient",
        tensor: str | None = None,
        rotate: int = 1,
        outside: bool = False,
    ) -> Buffer:
        """Create a buffer; inside a chunk region its home is that region unless `outside`.

        Parameters
        ----------
        shape
            Ints and dims.
        tensor
            A weight's name in the checkpoint; `a.{0:64}.b` stacks 64 tensors along a new first axis.
        rotate
            Slots of a double buffer in a body that is laid out once; iteration i uses slot i mod `rotate`.
        """
        source = _caller()
        full = self._full(name, shared=kind in SHARED)
        if dtype not in ITEMSIZE:
            raise GraphError(f"{full} ({source}): unknown dtype '{dtype}', one of {', '.join(ITEMSIZE)}")
        for dim in shape:
            if not self._is_size(dim):
                raise GraphError(f"{full} ({source}): {dim!r} is no size; use positive integers and dims of this graph")
        if full in self._names:
            raise GraphError(
                f"{full} ({source}): the name is taken by {self._names[full]} ({self._names[full].source})"
            )
        home = None if outside or kind not in ("transient", "scratch") else self._region
        buffer = Buffer(
            id=len(self.buffers), name=full, kind=kind, spec=Spec(tuple(shape), dtype), home=home, tensor=tensor,
            rotate=rotate, source=source,
        )  # fmt: skip
        self.buffers.append(buffer)
        self._names[full] = buffer
        return buffer

    def _is_size(self, dim: object) -> bool:
        if isinstance(dim, sympy.Expr):
            if dim not in self._sizes:
                names = [symbol.name for symbol in dim.free_symbols]
                if not all(name in self.dims or name.removesuffix("_rows") in self.tiles for name in names):
                    return False
                self._sizes.add(dim)
            return True
        return isinstance(dim, int) and not isinstance(dim, bool) and dim > 0

    def input(self, name: str, shape: Sequence[Dim], dtype: str) -> Buffer:
        """A buffer that the caller fills before the step."""
        return self.buffer(name, shape, dtype, kind="input")

    def output(self, name: str, shape: Sequence[Dim], dtype: str) -> Buffer:
        """A buffer that holds its value when the step ends, until the next call."""
        return self.buffer(name, shape, dtype, kind="output")

    def state(self, name: str, shape: Sequence[Dim], dtype: str) -> Buffer:
        """Memory that outlives a step; the same name gives the same buffer."""
        return self._shared(name, shape, dtype, "state", None)

    def carry(self, name: str, shape: Sequence[Dim], dtype: str) -> Buffer:
        """Memory handed from one graph of a step to the next; the same name gives the same buffer."""
        return self._shared(name, shape, dtype, "carry", None)

    def weight(self, name: str, shape: Sequence[Dim], dtype: str, *, tensor: str | None = None) -> Buffer:
        """A parameter; registering the same name twice ties the two uses."""
        return self._shared(name, shape, dtype, "weight", tensor)

    def _shared(self, name: str, shape: Sequence[Dim], dtype: str, kind: Kind, tensor: str | None) -> Buffer:
        found = self._names.get(self._full(name, shared=True))
        if found is None:
            return self.buffer(name, shape, dtype, kind=kind, tensor=tensor)
        if found.kind != kind or found.spec != Spec(tuple(shape), dtype):
            raise GraphError(
                f"{found.name} ({_caller()}): asked for a {kind} {Spec(tuple(shape), dtype)}, "
                f"but it is a {found.kind} {found.spec} ({found.source})"
            )
        if tensor is not None and tensor != found.tensor:
            raise GraphError(
                f"{found.name} ({_caller()}): asked for tensor '{tensor}', but it is '{found.tensor}' ({found.source})"
            )
        return found

    def __getitem__(self, name: str) -> Buffer:
        """Fetch a buffer by its full name."""
        if name not in self._names:
            raise GraphError(f"no buffer '{name}' in graph '{self.name}'")
        return self._names[name]

    # -- ops ----------------------------------------------------------------------------------------------------

    def add_op(
        self,
        operator: str | Operator,
        *reads: Buffer | None,
        out: Buffer | Sequence[Buffer] | None = None,
        name: str | None = None,
        **attrs: Any,
    ) -> Any:
        """Append one launch and return what it writes: a buffer, a tuple of them, or the operand it updates.

        Parameters
        ----------
        operator
            The name of one that Mosaic ships, or an `Operator` of your own.
        reads
            Operands in the operator's order; `None` or nothing for an optional one.
        out
            Buffers to write into instead of new ones: outputs, or ones defined outside a region and filled slice by slice.
        attrs
            The operator's attributes. Symbolic ones inform the cost model; plain ones also reach the kernel.

        Raises
        ------
        GraphError
            Where shapes do not agree, naming the op, the shapes and the source line.
        """
        source = _caller()
        rule = self._record(operator, source)
        full = self._full(name or rule.name)
        serial = 2
        while full in self._op_names:
            full, serial = f"{self._full(name or rule.name)}.{serial}", serial + 1
        self._op_names.add(full)
        _plain_attributes(attrs, full, source)
        operands = self._operands(rule, reads, full, source)
        given = tuple(attrs.items())
        asked = _asked(rule, self._seen(operands), self._loops, given)
        slices = self._slices(asked.cuts, operands, full, source)
        if asked.work is None:
            raise GraphError(f"{full} ({source}): {asked.refused}")
        work = asked.work
        created = self._outputs(rule, work.outputs, out, full, source)
        for buffer in created.values():
            if any(buffer is operand for operand in operands.values()):
                raise GraphError(
                    f"{full} ({source}): out= gives {buffer}, which it also reads; write a buffer that aliases it, "
                    f"or use an operator that updates it"
                )
        wrote = _results(self.backend, rule, asked.specs, self._seen(created), self._loops, given)
        read = tuple(operands.values())
        operands.update(created)
        if wrote.scratch != 0:
            operands["scratch"] = self.buffer(
                f"{name or rule.name}:scratch@{len(self.ops)}", (wrote.scratch,), "uint8", kind="scratch"
            )
        slices += self._slices(wrote.cuts, operands, full, source)
        updated = [operands[key] for key in rule.updates if key in operands]
        for buffer in (*created.values(), *updated):
            if buffer.kind == "weight":
                raise GraphError(f"{full} ({source}): writes the weight {buffer} ({buffer.source}); use a state")
        op = Op(
            index=len(self.ops), name=full, operator=rule, operands=operands,
            reads=read, writes=(*created.values(), *updated, *([operands["scratch"]] if "scratch" in operands else [])),
            attrs=attrs, region=self._region, stream=self._stream.name if self._stream else MAIN,
            slices=slices, inplace=rule.inplace_on(self.backend), flops=work.flops, bytes=work.bytes,
            rate_rows=work.rate_rows, source=source,
            rate="link" if any(b.pool == "host" for b in operands.values()) else rule.rate,
            rate_columns=work.rate_columns,
        )  # fmt: skip
        self._order(op)
        self.ops.append(op)
        results = tuple(created.values()) or tuple(updated)
        return results[0] if len(results) == 1 else results

    def _record(self, operator: str | Operator, source: str) -> Operator:
        """The record of an operator, which plans bring along: one for each name."""
        if isinstance(operator, str):
            operator = self.operators.get(operator) or shipped(operator)
        if self.operators.setdefault(operator.name, operator) is not operator:
            raise GraphError(f"{operator.name} ({source}): another operator of this graph has the same name")
        return operator

    def _operands(self, rule: Operator, reads: Sequence[Buffer | None], full: str, source: str) -> dict[str, Buffer]:
        required = sum(not name.endswith("?") for name in rule.reads)
        if not required <= len(reads) <= len(rule.reads):
            raise GraphError(f"{full} ({source}): {rule.name} reads {', '.join(rule.reads)}, got {len(reads)} operands")
        found: dict[str, Buffer] = {}
        for name, buffer in zip(rule.reads, reads, strict=False):
            if buffer is None and name.endswith("?"):
                continue
            if not self._owns(buffer):
                raise GraphError(f"{full} ({source}): operand '{name}' must be a buffer of this graph, got {buffer!s}")
            found[name.rstrip("?")] = buffer
        return found

    def _owns(self, buffer: object) -> TypeGuard[Buffer]:
        return isinstance(buffer, Buffer) and buffer.id < len(self.buffers) and self.buffers[buffer.id] is buffer

    def _seen(self, operands: Mapping[str, Buffer]) -> _Seen:
        """What of the operands one iteration's sizes follow from."""
        return tuple((key, buffer.spec, self._inside(buffer)) for key, buffer in operands.items())

    def _inside(self, buffer: Buffer) -> int:
        """How many of the open regions a buffer's home lies in."""
        home = buffer.home
        if home is None or not self._open:
            return 0
        return len(self._open) if home is self._region else sum(region.encloses(home) for region in self._open)

    def _slices(
        self, cuts: Sequence[_Cut], operands: Mapping[str, Buffer], full: str, source: str
    ) -> tuple[Slice, ...]:
        found = []
        for key, axis, index, factor, dim in cuts:
            region = self._open[index]
            if factor is None:
                raise GraphError(
                    f"{full} ({source}): region {region.name} cannot slice axis {axis} of {key} {operands[key]}: "
                    f"{dim} is no multiple of {region.over}; let the operator take '{key}' whole, or define the "
                    "buffer inside the region"
                )
            found.append(Slice(key, axis, region.name, factor))
        return tuple(found)

    def _outputs(
        self, rule: Operator, inferred: Sequence[Spec], out: Buffer | Sequence[Buffer] | None, full: str, source: str
    ) -> dict[str, Buffer]:
        if len(inferred) != len(rule.writes):
            raise GraphError(f"{full} ({source}): {rule.name} infers {len(inferred)} specs for writes {rule.writes}")
        if out is None:
            many = len(inferred) > 1
            base = full.rsplit("/", 1)[-1]
            return {
                key: self.buffer(f"{base}.{key}" if many else base, spec.shape, spec.dtype)
                for key, spec in zip(rule.writes, inferred, strict=True)
            }
        given = (out,) if isinstance(out, Buffer) else tuple(out)
        for buffer in given:
            if not self._owns(buffer):
                raise GraphError(f"{full} ({source}): out= must give buffers of this graph, got {buffer!s}")
        if len(given) != len(inferred):
            raise GraphError(f"{full} ({source}): {rule.name} writes {', '.join(rule.writes)}, out= gives {len(given)}")
        for key, spec, buffer in zip(rule.writes, inferred, given, strict=True):
            if _view(buffer.spec, self._loops, self._inside(buffer), key in rule.whole).seen != spec:
                raise GraphError(f"{full} ({source}): writes {key} {spec}, but out= is {buffer} ({buffer.source})")
        return dict(zip(rule.writes, given, strict=True))

    # -- constraints --------------------------------------------------------------------------------------------

    @contextmanager
    def chunk(
        self, knob: str, *, over: sympy.Symbol, tile: int = 128, name: str | None = None
    ) -> Iterator[sympy.Symbol]:
        """Open a region whose ops see slices of `over`; yields the symbol of the slice's rows.

        Regions with the same `knob` share one chunk size, so they run over the same dim and have the same `tile`, the
        granule of that size. The planner may dissolve the region (one pass over everything); then the ops run in the
        order written here.

        Raises
        ------
        GraphError
            A dim of another graph, a knob used over two dims or with two tiles or inside itself, a region without ops.
        """
        region = Region(
            name=self._full(name or knob), knob=knob, over=over, parent=self._region, start=len(self.ops),
            rows=_symbol(f"{knob}_rows"),
        )  # fmt: skip
        if region.name in self._region_names:
            raise GraphError(f"region {region.name} ({_caller()}): the name is taken")
        if any(outer.over == over for outer in self._open):
            raise GraphError(f"chunk '{knob}' ({_caller()}): a region over {over} is open already")
        self.knob(knob, over=over, tile=tile)
        self.regions.append(region)
        self._region_names.add(region.name)
        outer = self._region
        self._enter(region)
        try:
            yield region.rows
        finally:
            self._enter(outer)
            region.end = len(self.ops)
        if region.end == region.start:
            raise GraphError(f"region {region.name} ({_caller()}) has no ops")

    def _enter(self, region: Region | None) -> None:
        """Let ops be registered in a region from now on."""
        self._region = region
        self._open = region.chain if region is not None else ()
        self._loops = tuple((r.over, r.rows) for r in self._open)

    def _check_knob(self, knob: str, over: sympy.Symbol, tile: int, source: str) -> None:
        """One knob is one number of rows: one dim, one tile, and never nested in itself."""
        if str(over) not in self.dims or self.dims[str(over)].symbol != over:
            raise GraphError(f"chunk '{knob}' ({source}): over= must be a dim of this graph, got {over}")
        known = self.knob_dims.get(knob, over)
        if known != over:
            raise GraphError(f"chunk '{knob}' ({source}): over {over}, but the same knob is over {known} elsewhere")
        if self.tiles.get(knob, tile) != tile:
            raise GraphError(
                f"chunk '{knob}' ({source}): tile {tile}, but the same knob was given tile {self.tiles[knob]}"
            )
        if f"{knob}_rows" in self.dims:
            raise GraphError(
                f"chunk '{knob}' ({source}): its rows would be called {knob}_rows, which is a dim; name it otherwise"
            )

    def add_alias(self, a: Buffer, b: Buffer, *, offset: Dim = 0) -> None:
        """Let `a` occupy `b`'s storage from byte `offset` on, a multiple of 512; legality is proved by `validate`.

        Raises
        ------
        GraphError
            An alias of itself, a second alias, one of a double buffer or outside the workspace, an offset that may be misaligned.
        """
        source = _caller()
        if a is b or a.id in self.aliases:
            raise GraphError(f"{a.name} ({source}): " + ("aliases itself" if a is b else "is an alias already"))
        if a.pool != "workspace" or b.pool != "workspace":
            raise GraphError(f"{a.name} ({source}): a {a.kind} cannot alias a {b.kind}")
        if max(a.rotate, b.rotate) > 1:
            raise GraphError(
                f"{a.name} ({source}): the slots of a double buffer are shared with no alias, not with {b.name}"
            )
        if not divides(ALIGNMENT, offset):
            raise GraphError(
                f"{a.name} ({source}): lies {offset} bytes into {b.name}, which is no multiple of {ALIGNMENT} for all dims"
            )
        if any(root is a for root, _ in self.aliases.values()):
            raise GraphError(f"{a.name} ({source}): others alias it already; alias the root first")
        root, at = self.aliases.get(b.id, (b, 0))
        self.aliases[a.id] = (root, at + offset)

    def add_barrier(self, *buffers: Buffer, since: int | None = None, name: str = "barrier") -> None:
        """Keep buffers alive until here, and from `since` (an earlier `mark()`) on where given."""
        source = _caller()
        if not self.ops:
            raise GraphError(f"barrier ({source}): nothing has been registered yet")
        if not buffers or not all(map(self._owns, buffers)):
            raise GraphError(f"barrier ({source}): name the buffers of this graph to keep")
        if since is not None and not 0 <= since < len(self.ops):
            raise GraphError(f"barrier ({source}): since={since} is no earlier mark() (there are {len(self.ops)} ops)")
        serial = sum(barrier.name.startswith(self._full(name)) for barrier in self.barriers)
        full = self._full(name) + (f".{serial + 1}" if serial else "")
        self.barriers.append(Barrier(name=full, buffers=buffers, start=since, end=len(self.ops), source=source))

    def mark(self) -> int:
        """The current point in program order, for `add_barrier(since=)`."""
        return len(self.ops)

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """Register ops that run beside the main stream, forked after the last main op; join with `wait`."""
        if self._stream is not None or name == MAIN:
            raise GraphError(f"stream '{name}' ({_caller()}): streams fork from the main stream only")
        forked = self._last_main
        side = self._side.get(name)
        if side is None or side.last is None:
            side = self._side[name] = _SideStream(name, forked)
        else:
            side.forked_after, side.first = forked, None
        self._stream = side
        try:
            yield
        finally:
            self._stream = None

    def wait(self, name: str) -> None:
        """Let the next main op wait for everything registered on a side stream so far."""
        side = self._side.get(name)
        if side is None or side.last is None:
            raise GraphError(f"wait('{name}') ({_caller()}): nothing was registered on that stream")
        self._waits.append(side.last)

    def _order(self, op: Op) -> None:
        side = self._stream
        if side is not None:
            if side.first is None:
                side.first = op.index
                if side.forked_after >= 0:
                    self.edges.append(Edge("fork", side.forked_after, op.index))
            side.last = op.index
            return
        self._last_main = op.index
        self.edges.extend(Edge("wait", last, op.index) for last in self._waits)
        self._waits.clear()

    def __repr__(self) -> str:
        knobs = ", ".join(self.tiles) or "none"
        return (
            f"Graph '{self.name}': {len(self.ops)} ops, {len(self.buffers)} buffers, {len(self.regions)} regions; "
            f"dims {', '.join(self.dims) or 'none'}; knobs {knobs}"
        )

    def _repr_png_(self) -> bytes | None:
        """The picture of the graph, where matplotlib is installed (notebooks)."""
        from mosaic.viz.graph_picture import graph_png  # upwards, but only when a notebook asks for a picture

        try:
            return graph_png(self)
        except MissingExtra:
            return None

    def root(self, buffer: Buffer) -> Buffer:
        """The buffer whose storage this one occupies."""
        return self.aliases[buffer.id][0] if buffer.id in self.aliases else buffer


# What follows is a function of symbolic sizes alone. Layers repeat theirs, and so do the graphs of a model's other choices;
# symbolic arithmetic is slow. Equal results are one object, so that looking them up again compares identities.


@cache
def _symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, positive=True, integer=True)


_Loops: TypeAlias = tuple[tuple[sympy.Symbol, sympy.Symbol], ...]
"""Of nested regions, outermost first: the dim that each runs over, and the rows of one iteration."""
_Seen: TypeAlias = tuple[tuple[str, Spec, int], ...]
"""Operands: name, spec, and the number of open loops that hold its home."""
_Specs: TypeAlias = tuple[tuple[str, Spec], ...]
_Attributes: TypeAlias = tuple[tuple[str, Any], ...]
_Cut: TypeAlias = tuple[str, int, int, int | None, Dim]
"""One slicing of an operand: its name, axis, loop, factor (none: the axis cannot be sliced) and the dim that is sliced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What an operator says of one launch."""

    outputs: tuple[Spec, ...]
    flops: Dim
    bytes: Dim
    rate_rows: Dim
    rate_columns: Dim


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What one launch reads, as an iteration of the open loops sees it, and its work; none: why it is `refused`."""

    specs: _Specs
    cuts: tuple[_Cut, ...]
    work: _Work | None
    refused: str = ""


@lru_cache(maxsize=_KEPT)
def _asked(rule: Operator, reads: _Seen, loops: _Loops, attrs: _Attributes) -> _Asked:
    specs, cuts = _iteration(rule, reads, loops)
    if any(factor is None for *_, factor, _ in cuts):
        return _Asked(specs=specs, cuts=cuts, work=None)
    try:
        return _Asked(specs=specs, cuts=cuts, work=_work(rule, specs, attrs))
    except (GraphError, TypeError, IndexError) as error:
        shown = ", ".join(f"{key} {spec}" for key, spec in specs)
        return _Asked(specs=specs, cuts=cuts, work=None, refused=f"{rule.name}({shown}): {error}")


def _work(rule: Operator, specs: _Specs, attrs: _Attributes) -> _Work:
    operands, given = dict(specs), dict(attrs)
    outputs = tuple(rule.infer(**operands, **given))
    return _Work(
        outputs=outputs,
        flops=rule.flops(**operands, **given),
        bytes=rule.moved({**operands, **dict(zip(rule.writes, outputs, strict=False))}, given),
        rate_rows=rule.rate_rows(**operands, **given),
        rate_columns=rule.rate_columns(**operands, **given),
    )


@dataclass(frozen=True, slots=True)
class _Results:
    """What one launch writes as an iteration sees it, its scratch bytes among it."""

    scratch: Dim
    cuts: tuple[_Cut, ...]


@lru_cache(maxsize=_KEPT)
def _results(backend: str, rule: Operator, reads: _Specs, writes: _Seen, loops: _Loops, attrs: _Attributes) -> _Results:
    specs, cuts = _iteration(rule, writes, loops)
    scratch = rule.scratch_bytes(backend, dict(reads + specs), dict(attrs))
    if scratch != 0:
        cuts += _iteration(rule, (("scratch", Spec((scratch,), "uint8"), len(loops)),), loops)[1]
    return _Results(scratch, cuts)


def _iteration(rule: Operator, operands: _Seen, loops: _Loops) -> tuple[_Specs, tuple[_Cut, ...]]:
    """Operands as one iteration of some nested loops sees them, and the slices that make it so."""
    views = {key: _view(spec, loops, inside, key in rule.whole) for key, spec, inside in operands}
    return (
        tuple((key, view.seen) for key, view in views.items()),
        tuple((key, *cut) for key, view in views.items() for cut in view.cuts),
    )


@dataclass(frozen=True, slots=True)
class _View:
    """An operand as one iteration of some nested loops sees it, and the slices that make it so: axis, loop, factor (none:
    the axis cannot be sliced) and the dim that is sliced."""

    seen: Spec
    cuts: tuple[tuple[int, int, int | None, Dim], ...]


@lru_cache(maxsize=_KEPT)
def _view(spec: Spec, loops: _Loops, inside: int, whole: bool) -> _View:
    """The outermost `inside` loops hold the operand's home; the others slice it, unless the operator takes it whole."""
    cuts: list[tuple[int, int, int | None, Dim]] = []
    shape = spec.shape
    for index, (over, rows) in enumerate(loops):
        outside = index >= inside
        if whole and outside:
            break
        for axis, dim in enumerate(shape):
            factor = _factor(dim, over if outside else rows)
            if factor is not None or (outside and not isinstance(dim, int) and dim.has(over)):
                cuts.append((axis, index, factor, dim))
        if outside:
            shape = tuple(_swap(dim, over, rows) for dim in shape)
    return _View(Spec(shape, spec.dtype), tuple(cuts))


def _swap(dim: Dim, old: sympy.Symbol, new: sympy.Symbol) -> Dim:
    if isinstance(dim, int):
        return dim
    swapped: Dim = dim.subs(old, new) if dim.has(old) else dim
    return swapped


def _factor(dim: Dim, symbol: sympy.Symbol) -> int | None:
    """The integer f with dim == f * symbol, if there is one."""
    if isinstance(dim, int) or not dim.has(symbol):
        return None
    factor = sympy.simplify(dim / symbol) if dim != symbol else sympy.Integer(1)
    return int(factor) if factor.is_Integer else None


def _plain_attributes(attrs: Mapping[str, Any], full: str, source: str) -> None:
    """Plans are JSON: an attribute is a number, a string or a boolean, or a symbolic size."""
    for key, value in attrs.items():
        if not isinstance(value, bool | int | float | str | sympy.Expr):
            raise GraphError(
                f"{full} ({source}): attribute {key}={value!r} must be a number, a string, a boolean or a dim"
            )


def _caller() -> str:
    """`file:line` of the registering code: the first frame outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("mosaic.registrar", "contextlib")
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
