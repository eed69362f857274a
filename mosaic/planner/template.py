"""A graph compiled to numbers: symbolic sizes become integer coefficient tables.

What is left of a graph is plain data. A `Template` has one `Body` per combination of
choices; a body's ops and buffers refer to rows of its polynomial table.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, TypeAlias

from mosaic.errors import GraphError
from mosaic.planner.body import Body, BufferRecord, ChoiceRecord, DimRecord, KnobRecord, OpRecord, RegionRecord
from mosaic.planner.layers import copies, repeat
from mosaic.planner.polynomials import Polynomials, factor_columns
from mosaic.registrar.operators import find

__all__ = [
    "Bodies",
    "Register",
    "Template",
    "collector_paused",
    "compile_template",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The compiled graphs of a phase, for every combination of choices.

    Parameters
    ----------
    name
        The phase.
    dims, knobs
        Symbolic dims and chunk knobs, in order of declaration.
    The choices; `bodies` has one entry per combination, keyed by the chosen options, compiled on first use.
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
            If a dim is missing, below 1 or above its bound.
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
    """The bodies of all combinations of choices, each compiled on first use.

    Parameters
    ----------
    choices
        The choices, in order.
    compile_now
        Compiles the body of one combination.
    """

    def __init__(self, choices: Sequence[ChoiceRecord], compile_now: Callable[[tuple[str, ...]], Body]) -> None:
        self._keys = tuple(product(*(choice.options for choice in choices)))
        self._compile, self._known = compile_now, dict[tuple[str, ...], Body]()

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
    """Compile a model; its bodies are compiled on first use."""
    first: Any = register(None)
    shell = Template(
        name=first.name, backend=first.backend, dims=_dims_of(first), knobs=_knobs_of(first),
        choices=_choices_of(first), bodies={},
    )  # fmt: skip
    graphs = {tuple(choice.options[0] for choice in shell.choices): first}  # until its body is asked for

    def body(options: tuple[str, ...]) -> Body:
        return _compile_choices(register, shell, options, graphs.pop(options, None))

    return replace(shell, bodies=Bodies(shell.choices, body))


def _compile_choices(register: Register, shell: Template, options: Sequence[str], graph: Any | None) -> Body:
    """Register the model with one option of every choice, unless its graph exists; validate and compile it.

    Parameters
    ----------
    shell
        The dims, knobs and choices that all bodies share, in order.

    Raises
    ------
    GraphError
        If these options declare other dims, knobs or choices than the first ones: a template has one list of each.
    """
    from mosaic.registrar.validate import validate

    with collector_paused():
        if graph is None:
            graph = register({choice.name: option for choice, option in zip(shell.choices, options, strict=True)})
        _require_same(shell, graph, options)
        validate(graph)
        return compile_body(graph)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the garbage collector from traversing the unfinished graph repeatedly: that is a third of the time of
    compiling, a fifth of planning.

    Of concurrent threads, the one that found it enabled enables it again.
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
    """Compare the declarations of some options with those of the first ones."""
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
    """Names of records with their other fields, such as "body (tokens, 16)"."""
    said = ((record[0], [str(value) for value in record[1:] if value not in (None, False)]) for record in records)
    return ", ".join(f"{name} ({', '.join(more)})" if more else name for name, more in said) or "none"


def compile_body(graph: Any) -> Body:
    """Compile one registered graph into coefficient tables and records; a brief graph is expanded to all its layers."""
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
        for b in (
            op.operands.values()
        ):  # numbers rows in order of ops, so that bodies with the same layers number them alike
            polynomials.rows_of(b.spec)
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
        repeat(tables, run)
    ops, buffers, regions, barriers, edges = map(tuple, tables)
    buffers += tuple(_shared(graph, {b.name for b in buffers}, buffer_record))
    exponents, coefficients, denominators = polynomials.tables()
    return Body(
        variables=polynomials.variables, exponents=exponents, coefficients=coefficients, denominators=denominators,
        ops=ops, buffers=buffers, regions=regions, barriers=barriers, edges=edges, factors=factor_columns(exponents),
        operators={name: found for name, found in graph.operators.items() if found is not find(name, {})},
    )  # fmt: skip


def _shared(graph: Any, names: Set[str], record: Callable[[Any], BufferRecord]) -> Iterator[BufferRecord]:
    """Yield the shared buffers of a brief graph's program, except those of these names."""
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
    """Attributes that the kernel gets: numbers, strings and booleans; symbolic ones only inform the cost."""
    return {key: value for key, value in attrs.items() if isinstance(value, bool | int | float | str)}
