"""A graph compiled to numbers: symbolic sizes become integer coefficient tables.

What is left of a graph is plain data that a JSON file can hold. A `Template` has one `Body` per combination of
choices; a body's ops and buffers refer to rows of its polynomial table.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise, product
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mosaic.errors import GraphError
from mosaic.planner.layers import copies, repeat
from mosaic.planner.polynomials import Polynomials, factor_columns
from mosaic.registrar.operator import Operator
from mosaic.registrar.operators import find

__all__ = [
    "Access",
    "Bodies",
    "Body",
    "BufferRecord",
    "ChoiceRecord",
    "DimRecord",
    "KnobRecord",
    "OpRecord",
    "RegionRecord",
    "Register",
    "Template",
    "collector_paused",
    "compile_choices",
    "compile_template",
]

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

    `ways` names the implementations that the backend has; where it is one, `rate` is its rate, else the operator's.
    """

    name: str
    kernel: str
    stream: str
    region: int | None
    reads: list[int]
    writes: list[int]
    updates: list[int]
    operands: dict[str, int]
    attrs: dict[str, Any]
    inplace: list[list[int]]
    slices: list[list[Any]]
    rate: str
    flops: int
    bytes: int
    rate_rows: int
    rate_columns: int
    ways: list[str]


class BufferRecord(NamedTuple):
    """One buffer; `shape` and `bytes` (of one slot) are rows of the polynomial table."""

    name: str
    kind: str
    pool: str
    dtype: str
    shape: list[int]
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
    are those of its ops that Mosaic does not ship.
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
        """First access and last + 1 of every buffer, before loops, barriers and streams stretch them."""
        num_ops = len(self.ops)
        starts, ends = [], []
        for buffer, seen in zip(self.buffers, self.accesses, strict=True):
            constant = buffer.kind == "host" and (seen[0].read if seen else buffer.tensor is not None)
            carried = seen if buffer.kind == "carry" else []
            taken, handed = any(a.read for a in carried[:1]), any(a.write for a in carried)
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
        """Of every side op its region, the ops from its fork to its join, [start, end), and the buffers that it touches."""
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
        """Every root of the workspace, ascending, with the buffers that occupy its storage, itself first."""
        members = {b: [b] for b, r in enumerate(self.buffers) if r.alias_of is None and r.pool == "workspace"}
        for b, buffer in enumerate(self.buffers):
            if buffer.alias_of in members:
                members[buffer.alias_of].append(b)
        return list(members.items())

    @cached_property
    def reused(self) -> list[tuple[int, list[int]]]:
        """Those of `groups` that may hold no value for a while: of several buffers, or of one that is overwritten whole."""
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
        """The dtype of most weights, in host memory and outside the plan too; the first of equals, float32 where there are none."""
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
        """Knobs with a region that holds side ops: iterations overlap by rotating buffers, so it is never off."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """Everything the planner needs of a model, for every choice of its knobs.

    Parameters
    ----------
    name
        The phase.
    dims, knobs
        Symbolic dims and chunk knobs, in order of declaration.
    choices
        The choices; `bodies` has one entry per combination, keyed by the chosen options, compiled when asked for.
    """

    name: str
    backend: str
    dims: tuple[DimRecord, ...]
    knobs: tuple[KnobRecord, ...]
    choices: tuple[ChoiceRecord, ...]
    bodies: Mapping[tuple[str, ...], Body]

    @property
    def first(self) -> Body:
        """The body with every choice at its first option."""
        return self.bodies[tuple(choice.options[0] for choice in self.choices)]

    def dims_of(self, given: Mapping[str, int]) -> dict[str, int]:
        """Complete dims with fixed values and check bounds.

        Raises
        ------
        GraphError
            A missing, non-positive or too large dim.
        """
        values: dict[str, int] = {}
        for dim in self.dims:
            value = given.get(dim.name, dim.value)
            if value is None:
                raise GraphError(
                    f"the plan needs a value for the dim '{dim.name}'; dims: {', '.join(d.name for d in self.dims)}"
                )
            if value < 1:
                raise GraphError(f"the dim '{dim.name}' must be at least 1, got {value}")
            values[dim.name] = int(value)
        for dim in self.dims:
            if dim.at_most is not None and values[dim.name] > values[dim.at_most]:
                raise GraphError(
                    f"{dim.name} = {values[dim.name]:,} exceeds {dim.at_most} = {values[dim.at_most]:,}, which bounds it"
                )
        return values


class Bodies(Mapping[tuple[str, ...], Body]):
    """The bodies of all combinations of choices, each compiled when it is first asked for.

    Parameters
    ----------
    choices
        The choices, in order.
    compile_now
        Gives the body of one combination.
    known
        Where bodies are kept; those in it are not compiled.
    """

    def __init__(
        self,
        choices: Sequence[ChoiceRecord],
        compile_now: Callable[[tuple[str, ...]], Body],
        *,
        known: MutableMapping[tuple[str, ...], Body] | None = None,
    ) -> None:
        self._keys = tuple(product(*(choice.options for choice in choices)))
        self._compile, self._known = compile_now, {} if known is None else known

    def __getitem__(self, key: tuple[str, ...]) -> Body:
        if key not in self._known:
            if key not in self._keys:
                raise KeyError(key)
            self._known[key] = self._compile(key)
        return self._known[key]

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


Register: TypeAlias = Callable[[Mapping[str, str] | None], Any]
"""Builds the graph for given choices (None: the first options), such as `Model.graph` bound to its options."""


def compile_template(register: Register) -> Template:
    """Compile a model; its bodies follow when they are asked for."""
    first = register(None)
    shell = Template(
        name=first.name, backend=first.backend, dims=_dims_of(first), knobs=_knobs_of(first),
        choices=_choices_of(first), bodies={},
    )  # fmt: skip
    return replace(shell, bodies=Bodies(shell.choices, partial(compile_choices, register, shell)))


def compile_choices(register: Register, shell: Template, options: Sequence[str]) -> Body:
    """Register the model with one option of every choice, validate and compile it.

    Parameters
    ----------
    shell
        What all bodies share: their dims, knobs and choices, in order.

    Raises
    ------
    GraphError
        Where these options declare other dims, knobs or choices than the first ones: a template has one list of each.
    """
    from mosaic.registrar.validate import validate

    with collector_paused():
        graph = register({choice.name: option for choice, option in zip(shell.choices, options, strict=True)})
        _require_same(shell, graph, options)
        validate(graph)
        return compile_body(graph)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the cycle collector from walking what is being built again and again: a third of the time of compiling, a fifth
    of that of planning.

    Of threads that come and go, the one that found it on turns it on again.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _dims_of(graph: Any) -> tuple[DimRecord, ...]:
    return tuple(DimRecord(name, info.at_most, info.value) for name, info in graph.dims.items())


def _knobs_of(graph: Any) -> tuple[KnobRecord, ...]:
    return tuple(KnobRecord(name, str(graph.knob_dims[name]), tile) for name, tile in graph.tiles.items())


def _choices_of(graph: Any) -> tuple[ChoiceRecord, ...]:
    return tuple(ChoiceRecord(c.name, c.options, c.escalating, not c.alike) for c in graph.choices.values())


def _require_same(shell: Template, graph: Any, options: Sequence[str]) -> None:
    """Compare what some options declare with what the first ones do."""
    for what, expected, found in (
        ("dims", shell.dims, _dims_of(graph)),
        ("chunk knobs", shell.knobs, _knobs_of(graph)),
        ("choices", shell.choices, _choices_of(graph)),
    ):
        if tuple(expected) != tuple(found):
            taken = ", ".join(
                f"{choice.name}={option}" for choice, option in zip(shell.choices, options, strict=True)
                if option != choice.options[0]
            )  # fmt: skip
            raise GraphError(
                f"{graph.name} with {taken or 'the first options'} declares the {what} {_listed(found)}, with the first "
                f"options {_listed(expected)}: declare them ahead of what depends on a choice, a knob with g.knob"
            )


def _listed(records: Sequence[Any]) -> str:
    """Names of records with what they say besides it, such as "body (tokens, 16)"."""
    said = ((record[0], [str(value) for value in record[1:] if value not in (None, False)]) for record in records)
    return ", ".join(f"{name} ({', '.join(more)})" if more else name for name, more in said) or "none"


def compile_body(graph: Any) -> Body:
    """Turn one registered graph into coefficient tables and records: a brief one into those of all its layers."""
    polynomials = Polynomials([*graph.dims, *(f"{knob}_rows" for knob in graph.tiles)])
    region_index = {region.name: i for i, region in enumerate(graph.regions)}
    at = region_index.get

    def buffer_record(b: Any) -> BufferRecord:
        root, offset = graph.aliases.get(b.id, (None, 0)) if b.pool == "workspace" else (None, 0)
        shape, size = polynomials.rows_of(b.spec)
        return BufferRecord(
            b.name, b.kind, b.pool, b.dtype, shape, size,
            at(b.home.name) if b.home else None, b.tensor, b.rotate, root.id if root else None, polynomials.row(offset),
        )  # fmt: skip

    def op_record(op: Any) -> OpRecord:
        ways = op.operator.on(graph.backend)
        rate = ways[0].rate or op.operator.rate if len(ways) == 1 else op.operator.rate
        updates = [op.operands[name].id for name in op.operator.updates if name in op.operands]
        inplace = [
            [op.operands[w].id, op.operands[r].id] for w, r in op.inplace if w in op.operands and r in op.operands
        ]
        return OpRecord(
            op.name, op.operator.name, op.stream, at(op.region.name) if op.region else None,
            [*dict.fromkeys(b.id for b in op.reads)], [*dict.fromkeys(b.id for b in op.writes)], updates,
            {name: b.id for name, b in op.operands.items()}, _plain(op.attrs), inplace,
            [[s.operand, s.axis, s.region, s.factor] for s in op.slices], "link" if op.rate == "link" else rate,
            polynomials.row(op.flops), polynomials.row(op.bytes), polynomials.row(op.rate_rows),
            polynomials.row(op.rate_columns), [way.name for way in ways],
        )  # fmt: skip

    tables: tuple[list[Any], ...] = (
        [*map(op_record, graph.ops)],
        [*map(buffer_record, graph.buffers)],
        [
            RegionRecord(r.name, r.knob, r.over.name, at(r.parent.name) if r.parent else None, r.start, r.end)
            for r in graph.regions
        ],
        [(b.name, [x.id for x in b.buffers], b.start, b.end) for b in graph.barriers],
        [(e.kind, e.source, e.target) for e in graph.edges],
    )
    for run in reversed(graph.runs):
        repeat(tables, run, (OpRecord, BufferRecord, RegionRecord, _row, _row))
    ops, buffers, regions, barriers, edges = map(tuple, tables)
    buffers += tuple(_shared(graph, {b.name for b in buffers}, buffer_record))
    exponents, coefficients, denominators = polynomials.tables()
    return Body(
        variables=polynomials.variables, exponents=exponents, coefficients=coefficients, denominators=denominators,
        ops=ops, buffers=buffers, regions=regions, barriers=barriers, edges=edges, factors=factor_columns(exponents),
        operators={name: found for name, found in graph.operators.items() if found is not find(name, {})},
    )  # fmt: skip


def _row(*fields: Any) -> tuple[Any, ...]:
    return fields


def _shared(graph: Any, names: Set[str], record: Callable[[Any], BufferRecord]) -> Iterator[BufferRecord]:
    """Yield what the other graphs of a brief one's program share with it beside the buffers of these names."""
    for other in graph.others:
        found = [record(b) for b in other.buffers if b.is_shared]
        for run in other.runs:
            earlier, later = (
                [record(b) for b in other.buffers[i:j] if b.is_shared] for (_, i, *_), (_, j, *_) in pairwise(run.ends)
            )
            found += [BufferRecord(*row) for layer in copies(earlier, later, run.more) for row in layer]
        yield from (b for b in found if b.name not in names)
        names |= {b.name for b in found}


def _plain(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes that reach the kernel: numbers, strings and booleans; symbolic ones only inform the cost."""
    return {key: value for key, value in attrs.items() if isinstance(value, bool | int | float | str)}
