"""A registered graph as a body: its sizes as rows of a table of integer coefficients, and all layers of a brief graph.

Records of layers of one kind differ only in numbers: the layer in names and attributes, and ids of ops, buffers and
regions. The differences between two neighbours are continued. Records after the layers move behind them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from mosaic.errors import GraphError
from mosaic.planner.body import Body, BufferRecord, OpRecord, RegionRecord
from mosaic.registrar.operators import find
from mosaic.registrar.parts import Run
from mosaic.registrar.polynomial import Dim, Monomial, terms

Tables = Sequence[list[Any]]
"""Records of ops, buffers, regions, barriers and edges."""


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
        updates = tuple([op.operands[name].id for name in op.operator.updates if name in op.operands])
        inplace = tuple(
            [(op.operands[w].id, op.operands[r].id) for w, r in op.inplace if w in op.operands and r in op.operands]
        )
        return OpRecord(
            op.name, op.operator.name, op.stream, at(op.region.name) if op.region else None,
            tuple(dict.fromkeys([b.id for b in op.reads])), tuple(dict.fromkeys([b.id for b in op.writes])), updates,
            {name: b.id for name, b in op.operands.items()}, _plain(op.attrs), inplace,
            tuple([(s.operand, s.axis, s.region, s.factor) for s in op.slices]), "link" if op.rate == "link" else rate,
            polynomials.row(op.flops), polynomials.row(op.bytes), polynomials.row(op.rate_rows),
            polynomials.row(op.rate_columns), tuple([way.name for way in ways]),
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


# -- layers that a brief graph leaves out --------------------------------------------------------------------------------


def copies(earlier: Any, later: Any, more: int) -> Sequence[Any]:
    """Return the layer that follows two neighbours, as plain tuples.

    Raises
    ------
    GraphError
        If the neighbours differ in more than numbers.
    """
    return _copies(json.dumps(earlier), json.dumps(later), more)


@lru_cache(maxsize=128)
def _copies(earlier: str, later: str, more: int) -> Sequence[Any]:
    """Cached: bodies that differ only in their ending have the same layers."""
    before, now = (re.split("([0-9]+)", text.replace("%", "%%")) for text in (earlier, later))
    if before[::2] != now[::2]:
        raise GraphError("two layers of one kind differ in more than numbers: let their `kind` say so")
    counted = []
    for at in range(1, len(now), 2):
        if before[at] != now[at]:
            counted.append((int(now[at]), int(now[at]) - int(before[at])))
            now[at] = "%d"
    form = "".join(now)
    return [
        _tuples(json.loads(form % tuple([number + further * step for number, step in counted])))
        for further in range(1, more + 1)
    ]


def _tuples(value: Any) -> Any:
    return tuple([_tuples(part) for part in value]) if type(value) is list else value


def repeat(tables: Tables, run: Run) -> None:
    """Insert the omitted layers of a run."""
    earlier, later = ([table[i:j] for table, i, j in zip(tables, *ends, strict=True)] for ends in pairwise(run.ends))
    _, starts, ends = run.ends
    op, buffer, region, *_ = (_moved(i, run.more * (j - i)) for i, j in zip(starts, ends, strict=True))
    tails = [table[at:] for table, at in zip(tables, ends, strict=True)]
    for table, at in zip(tables, ends, strict=True):
        del table[at:]
    for layer in copies(earlier, later, run.more):
        for table, make, rows in zip(tables, _MAKERS, layer, strict=True):
            table.extend(make(*row) for row in rows)
    tables[0].extend(
        o._replace(
            region=region(o.region), reads=tuple(map(buffer, o.reads)), writes=tuple(map(buffer, o.writes)),
            updates=tuple(map(buffer, o.updates)), operands={name: buffer(b) for name, b in o.operands.items()},
            inplace=tuple([tuple(map(buffer, pair)) for pair in o.inplace]),
        )
        for o in tails[0]
    )  # fmt: skip
    tables[1].extend(b._replace(home=region(b.home), alias_of=buffer(b.alias_of)) for b in tails[1])
    tables[2].extend(r._replace(parent=region(r.parent), start=op(r.start), end=op(r.end)) for r in tails[2])
    tables[3].extend((name, [*map(buffer, ids)], op(start), op(end)) for name, ids, start, end in tails[3])
    tables[4].extend((kind, op(source), op(target)) for kind, source, target in tails[4])


def _moved(start: int, by: int) -> Callable[[Any], Any]:
    """Map ids from `start` on, of a run's last layer or of records after it, to their final ids."""
    return lambda number: number if number is None or number < start else number + by


def _row(*fields: Any) -> tuple[Any, ...]:
    return fields


_MAKERS: tuple[Callable[..., Any], ...] = (OpRecord, BufferRecord, RegionRecord, _row, _row)


# -- sizes --------------------------------------------------------------------------------------------------------------


class Polynomials:
    """Interns expressions as rows of a coefficient table."""

    def __init__(self, variables: Sequence[str]) -> None:
        self.variables = tuple(variables)
        self.rows: list[dict[tuple[int, ...], int | Fraction]] = []
        self._by_size: dict[Dim, int] = {}
        self._by_spec: dict[Any, tuple[tuple[int, ...], int]] = {}

    def row(self, size: Dim) -> int:
        """Return the row of a size.

        Raises
        ------
        GraphError
            If a size is divided by a dim, or has variables that the table lacks.
        """
        found = self._by_size.get(size)
        if found is None:
            if not isinstance(size, int) and not size.is_polynomial:
                raise GraphError(f"'{size}' is not a polynomial in {', '.join(sorted(size.names))}")
            found = self._by_size[size] = len(self.rows)
            self.rows.append({self._powers(monomial): c for monomial, c in terms(size)})
        return found

    def rows_of(self, spec: Any) -> tuple[tuple[int, ...], int]:
        """Return the rows of an operand's dims, and of its bytes."""
        if spec not in self._by_spec:
            self._by_spec[spec] = tuple([self.row(d) for d in spec.shape]), self.row(spec.bytes)
        return self._by_spec[spec]

    def _powers(self, monomial: Monomial) -> tuple[int, ...]:
        powers = [0] * len(self.variables)
        for name, power in monomial:
            if name not in self.variables:
                raise GraphError(f"'{name}' is no dim and no knob's rows; those are {', '.join(self.variables)}")
            powers[self.variables.index(name)] = power
        return tuple(powers)

    def tables(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        powers = sorted({power for row in self.rows for power in row})
        column = {power: i for i, power in enumerate(powers)}
        coefficients = np.zeros((len(self.rows), len(powers)), dtype=np.int64)
        denominators = np.ones(len(self.rows), dtype=np.int64)
        for i, row in enumerate(self.rows):
            denominator = prod({c.denominator for c in row.values()})
            denominators[i] = denominator
            for power, c in row.items():
                coefficients[i, column[power]] = int(c * denominator)
        return np.array(powers, dtype=np.int64).reshape(len(powers), len(self.variables)), coefficients, denominators


def factor_columns(exponents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[degree, monomials]: the variables that each monomial multiplies; the number of variables stands for a 1."""
    constant = exponents.shape[1]
    lists = [[v for v, power in enumerate(row) for _ in range(power)] for row in exponents.tolist()]
    degree = max(1, *map(len, lists)) if lists else 1
    columns = [row + [constant] * (degree - len(row)) for row in lists]
    return np.ascontiguousarray(np.array(columns, dtype=np.int64).reshape(len(lists), degree).T)
