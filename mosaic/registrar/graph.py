"""The graph of one forward phase: ops in program order, symbolic dims, no numbers.

A model is described, not traced. `add_op` infers shapes from operators and
refuses a mismatch on the line that wrote it; `chunk` opens a loop whose body
is laid out once; `add_alias`, `add_barrier` and `stream` state what lifetimes
cannot derive. Nothing here imports torch or knows a device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeGuard

from mosaic.errors import GraphError, MissingExtra
from mosaic.registrar.declarations import Declarations
from mosaic.registrar.operator import Dim, Operator, Spec, divides
from mosaic.registrar.operators import operator as shipped
from mosaic.registrar.parts import (
    ALIGNMENT,
    MAIN,
    Barrier,
    Buffer,
    Choice,
    Cut,
    DimInfo,
    Edge,
    Kind,
    Op,
    Region,
    Run,
    Seen,
    Slice,
    asked,
    caller,
    results,
    view,
)
from mosaic.registrar.polynomial import Polynomial, symbol

__all__ = ["MAIN", "Barrier", "Buffer", "Choice", "DimInfo", "Edge", "Graph", "Kind", "Op", "Region", "Slice"]


@dataclass(slots=True)
class _Side:
    """A side stream: the main op that it forked from, and its first and last op since."""

    name: str
    forked_after: int
    first: int | None = None
    last: int | None = None


class Graph(Declarations):
    """A parameterised template of one forward phase.

    Parameters
    ----------
    name
        The phase, such as `full_step`.
    backend
        The backend whose implementations declare scratch bytes: `cuda` or `cpu`.
    choices
        Options by choice; the first option by default.
    lenient
        Also take the first option if a value is unknown here: choices may be those of another graph of a program.
    brief
        Leave out layers that repeat others: see `layers`.

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

    def __init__(
        self, name: str, *, backend: str = "cuda", choices: Mapping[str, str] | None = None, lenient: bool = False,
        brief: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(name, choices=choices, lenient=lenient)
        self.backend, self.brief = backend, brief
        self.runs: list[Run] = []
        self.others: Sequence[Graph] = ()
        """For a brief graph, the other graphs of its program, whose weights and states it shares."""
        self.ops: list[Op] = []
        self.operators: dict[str, Operator] = {}
        self.handed: frozenset[str] = frozenset()
        """Carries that hold a value before the first op: another graph writes them."""
        self.regions: list[Region] = []
        self.barriers: list[Barrier] = []
        self.aliases: dict[int, tuple[Buffer, Dim]] = {}
        self._op_names: set[str] = set()
        self._region_names: set[str] = set()
        self.edges: list[Edge] = []
        """The order between streams: forks and waits."""
        self._waits: list[tuple[int, int | None]] = []
        self._sides: dict[str, _Side] = {}
        self._side: _Side | None = None
        self._last_main = -1
        self._enter(None)

    # -- ops ----------------------------------------------------------------------------------------------------

    def add_op(
        self,
        operator: str | Operator,
        *reads: Buffer | None,
        out: Buffer | Sequence[Buffer] | None = None,
        name: str | None = None,
        **attrs: Any,
    ) -> Any:
        """Append one launch and return its result: a buffer, a tuple of them, or the operand that it updates.

        Parameters
        ----------
        operator
            The name of a shipped operator, or an `Operator` of your own.
        reads
            Operands in the operator's order; `None` or nothing for an optional one.
        out
            Buffers to write into instead of new ones: outputs, or outer buffers that a region fills slice by slice.
        attrs
            The operator's attributes. Symbolic ones inform the cost model; plain ones also reach the kernel.

        Raises
        ------
        GraphError
            If shapes do not agree; the message names the op, the shapes and the source line.
        """
        source = caller()
        rule = self._record(operator, source)
        full = self._full(name or rule.name)
        serial = 2
        while full in self._op_names:
            full, serial = f"{self._full(name or rule.name)}.{serial}", serial + 1
        self._op_names.add(full)
        _plain_attributes(attrs, full, source)
        operands = self._operands(rule, reads, full, source)
        given = tuple(attrs.items())
        launch = asked(rule, self._seen(operands), self._loops, given)
        slices = self._slices(launch.cuts, operands, full, source)
        if launch.work is None:
            raise GraphError(f"{full} ({source}): {launch.refused}")
        work = launch.work
        created = self._outputs(rule, work.outputs, out, full, source)
        for buffer in created.values():
            if any(buffer is operand for operand in operands.values()):
                raise GraphError(
                    f"{full} ({source}): out= gives {buffer}, which it also reads; write a buffer that aliases it, "
                    f"or use an operator that updates it"
                )
        wrote = results(self.backend, rule, launch.specs, self._seen(created), self._loops, given)
        read = tuple(operands.values())
        operands.update(created)
        if wrote.scratch != 0:
            operands["scratch"] = self.buffer(
                f"{full.removeprefix(self._full(''))}:scratch", (wrote.scratch,), "uint8", kind="scratch"
            )
        slices += self._slices(wrote.cuts, operands, full, source)
        updated = [operands[key] for key in rule.updates if key in operands]
        for buffer in (*created.values(), *updated):
            if buffer.kind == "weight" or (buffer.kind == "host" and buffer.tensor is not None):
                raise GraphError(f"{full} ({source}): writes the weight {buffer} ({buffer.source}); use a state")
        op = Op(
            index=len(self.ops), name=full, operator=rule, operands=operands,
            reads=read, writes=(*created.values(), *updated, *([operands["scratch"]] if "scratch" in operands else [])),
            attrs=attrs, region=self._region, stream=MAIN if self._side is None else self._side.name,
            slices=slices, inplace=rule.inplace_on(self.backend), flops=work.flops, bytes=work.bytes,
            rate_rows=work.rate_rows, source=source,
            rate="link" if any(b.pool == "host" for b in operands.values()) else rule.rate,
            rate_columns=work.rate_columns,
        )  # fmt: skip
        self._order(op)
        self.ops.append(op)
        found = tuple(created.values()) or tuple(updated)
        return found[0] if len(found) == 1 else found

    def _record(self, operator: str | Operator, source: str) -> Operator:
        """The record of an operator, kept for plans: one per name."""
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

    def _seen(self, operands: Mapping[str, Buffer]) -> Seen:
        """The parts of the operands that determine one iteration's sizes."""
        return tuple((key, buffer.spec, self._inside(buffer)) for key, buffer in operands.items())

    def _inside(self, buffer: Buffer) -> int:
        """The number of open regions around a buffer's home."""
        home = buffer.home
        if home is None or not self._open:
            return 0
        return len(self._open) if home is self._region else sum(region.encloses(home) for region in self._open)

    def _slices(self, cuts: Sequence[Cut], operands: Mapping[str, Buffer], full: str, source: str) -> tuple[Slice, ...]:
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
        for buffer in given:
            if given.count(buffer) > 1:
                raise GraphError(f"{full} ({source}): out= gives {buffer} twice; each result needs a buffer of its own")
        for key, spec, buffer in zip(rule.writes, inferred, given, strict=True):
            if view(buffer.spec, self._loops, self._inside(buffer), key in rule.whole).seen != spec:
                raise GraphError(f"{full} ({source}): writes {key} {spec}, but out= is {buffer} ({buffer.source})")
        return dict(zip(rule.writes, given, strict=True))

    # -- constraints --------------------------------------------------------------------------------------------

    @contextmanager
    def chunk(self, knob: str, *, over: Polynomial, tile: int = 128, name: str | None = None) -> Iterator[Polynomial]:
        """Open a region whose ops see slices of `over`; yields the symbol of the slice's rows.

        Regions with the same `knob` share one chunk size, so they run over the same dim and have the same `tile`, the
        granule of that size. The planner may turn the region off (one pass over everything); then the ops run in the
        order written here.

        Raises
        ------
        GraphError
            If the dim is of another graph, a knob has two dims or tiles or is nested in itself, or a region has no ops.
        """
        region = Region(
            name=self._full(name or knob), knob=knob, over=over, parent=self._region, start=len(self.ops),
            rows=symbol(f"{knob}_rows"),
        )  # fmt: skip
        if region.name in self._region_names:
            raise GraphError(f"region {region.name} ({caller()}): the name is taken")
        if any(outer.over == over for outer in self._open):
            raise GraphError(f"chunk '{knob}' ({caller()}): a region over {over} is open already")
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
            raise GraphError(f"region {region.name} ({caller()}) has no ops")

    def _enter(self, region: Region | None) -> None:
        """Register ops in a region from now on."""
        self._region = region
        self._open = region.chain if region is not None else ()
        self._loops = tuple((r.over, r.rows) for r in self._open)

    def layers(self, numbers: Iterable[int], kind: Callable[[int], Hashable]) -> Iterator[int]:
        """Yield the numbers of the layers to register: in a brief graph, of neighbours of one kind the first three.

        Layers of one kind differ only in numbers, and each differs from the one before it by the same amounts.
        """
        for _, run in groupby(numbers, kind):
            layers, ends = list(run), []
            for layer in layers[:3] if self.brief else layers:
                yield layer
                tables = (self.ops, self.buffers, self.regions, self.barriers, self.edges)
                ends.append(tuple([len(table) for table in tables]))
            if len(ends) < len(layers):
                self.runs.append(Run(ends, len(layers) - 3))

    def add_alias(self, a: Buffer, b: Buffer, *, offset: Dim = 0) -> None:
        """Let `a` occupy `b`'s storage from byte `offset` on, a multiple of 512; legality is proved by `validate`.

        Raises
        ------
        GraphError
            An alias of itself, a second alias, one of a double buffer or outside the workspace, an offset that may be misaligned.
        """
        source = caller()
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
        """Keep buffers alive until here, from `since` (an earlier `mark()`) on if given."""
        source = caller()
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
        """Return the current point in program order, for `add_barrier(since=)`."""
        return len(self.ops)

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """Register ops that run beside the main stream, forked after the last main op; join with `wait`."""
        if self._side is not None or name == MAIN:
            raise GraphError(f"stream '{name}' ({caller()}): streams fork from the main stream only")
        side = self._sides.get(name)
        if side is None or side.last is None:
            side = self._sides[name] = _Side(name, self._last_main)
        else:
            side.forked_after, side.first = self._last_main, None
        self._side = side
        try:
            yield
        finally:
            self._side = None

    def wait(self, name: str, updates: Buffer | None = None) -> None:
        """Make the next main op, or the next that writes `updates`, wait for a side stream's ops so far."""
        side = self._sides.get(name)
        if side is None or side.last is None:
            raise GraphError(f"wait('{name}') ({caller()}): nothing was registered on that stream")
        self._waits.append((side.last, None if updates is None else updates.id))

    @property
    def open_waits(self) -> Sequence[int]:
        """Side ops that a later main op will wait for."""
        return [last for last, _ in self._waits]

    def _order(self, op: Op) -> None:
        """Note the edges of an op that was just registered."""
        side = self._side
        if side is None:
            self._last_main, writes = op.index, {buffer.id for buffer in op.writes}
            due = [wait for wait in self._waits if wait[1] is None or wait[1] in writes]
            self.edges.extend(Edge("wait", last, op.index) for last, _ in due)
            self._waits = [wait for wait in self._waits if wait not in due]
            return
        if side.first is None:
            side.first = op.index
            if side.forked_after >= 0:
                self.edges.append(Edge("fork", side.forked_after, op.index))
        side.last = op.index

    def __repr__(self) -> str:
        knobs = ", ".join(self.tiles) or "none"
        return (
            f"Graph '{self.name}': {len(self.ops)} ops, {len(self.buffers)} buffers, {len(self.regions)} regions; "
            f"dims {', '.join(self.dims) or 'none'}; knobs {knobs}"
        )

    def _repr_png_(self) -> bytes | None:
        """The picture of the graph for notebooks, if matplotlib is installed."""
        from mosaic.viz.graph_picture import graph_png  # imported late: viz is a layer above the registrar

        try:
            return graph_png(self)
        except MissingExtra:
            return None

    def root(self, buffer: Buffer) -> Buffer:
        """Return the buffer whose storage this one occupies."""
        return self.aliases[buffer.id][0] if buffer.id in self.aliases else buffer


def _plain_attributes(attrs: Mapping[str, Any], full: str, source: str) -> None:
    """Plans are JSON: an attribute is a number, a string or a boolean, or a symbolic size."""
    for key, value in attrs.items():
        if not isinstance(value, bool | int | float | str | Polynomial):
            raise GraphError(
                f"{full} ({source}): attribute {key}={value!r} must be a number, a string, a boolean or a dim"
            )
