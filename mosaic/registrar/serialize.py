"""A graph as JSON and back. Symbolic sizes are lists of terms, so nothing that is read is evaluated as code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Final

from mosaic.errors import GraphError
from mosaic.registrar.graph import Barrier, Buffer, Choice, DimInfo, Edge, Graph, Op, Region, Slice
from mosaic.registrar.operator import Dim, Operator, Spec
from mosaic.registrar.operators import find
from mosaic.registrar.polynomial import Polynomial, symbol

SCHEMA: Final = "mosaic.graph/1"


def to_json(graph: Graph) -> str:
    """Serialise a graph; byte-identical for identical graphs."""
    return json.dumps(_graph(graph), separators=(",", ":")) + "\n"


def from_json(text: str, *, operators: Mapping[str, Operator] | None = None) -> Graph:
    """Read a graph back. Shapes, lifetimes and costs survive.

    Parameters
    ----------
    operators
        Operators that Mosaic does not ship, by name. An operator that is not given has no rules and implementations.

    Raises
    ------
    GraphError
        If the text is no graph, of another schema, or damaged.
    """
    try:
        plain = json.loads(text)
    except ValueError as error:
        raise GraphError(f"not a graph: {error}") from None
    if not isinstance(plain, dict) or plain.get("schema") != SCHEMA:
        found = plain.get("schema") if isinstance(plain, dict) else None
        raise GraphError(f"not a graph of schema '{SCHEMA}', found {found!r}")
    try:
        return _Reader(plain, operators or {}).graph
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise GraphError(f"damaged graph: {type(error).__name__}: {error}") from None


def _graph(graph: Graph) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "name": graph.name,
        "backend": graph.backend,
        "dims": [[name, info.at_most, info.value] for name, info in graph.dims.items()],
        "choices": [[c.name, list(c.options), c.value, c.escalating, c.alike] for c in graph.choices.values()],
        "knobs": [[name, str(graph.knob_dims[name]), tile] for name, tile in graph.tiles.items()],
        "regions": [
            [r.name, r.knob, str(r.over), r.parent.name if r.parent else None, r.start, r.end] for r in graph.regions
        ],
        "buffers": [
            [
                b.name,
                b.kind,
                [_terms(d) for d in b.shape],
                b.dtype,
                b.home.name if b.home else None,
                b.tensor,
                b.rotate,
                b.source,
            ]
            for b in graph.buffers
        ],
        "aliases": [[a, root.id, _terms(offset)] for a, (root, offset) in graph.aliases.items()],
        "barriers": [[b.name, [x.id for x in b.buffers], b.start, b.end, b.source] for b in graph.barriers],
        "edges": [[e.kind, e.source, e.target] for e in graph.edges],
        "ops": [_op(op) for op in graph.ops],
    }


def _op(op: Op) -> dict[str, Any]:
    rule = op.operator
    return {
        "name": op.name,
        "contract": rule.name,
        "rule": [rule.operands, rule.attrs, [list(pair) for pair in rule.inplace], rule.rate],
        "operands": {key: b.id for key, b in op.operands.items()},
        "reads": [b.id for b in op.reads],
        "writes": [b.id for b in op.writes],
        "attrs": {
            key: value if isinstance(value, bool | int | float | str) else {"terms": _terms(value)}
            for key, value in op.attrs.items()
        },
        "region": op.region.name if op.region else None,
        "stream": op.stream,
        "slices": [[s.operand, s.axis, s.region, s.factor] for s in op.slices],
        "flops": _terms(op.flops),
        "bytes": _terms(op.bytes),
        "rate": op.rate,
        "rate_rows": _terms(op.rate_rows),
        "rate_columns": _terms(op.rate_columns),
        "source": op.source,
    }


def _terms(value: Dim) -> Any:
    """An int as itself, a polynomial as [[numerator, denominator, {symbol: power}], ...]."""
    if isinstance(value, int):
        return value
    return [[c.numerator, c.denominator, dict(monomial)] for monomial, c in value.terms]


class _Reader:
    """Rebuilds a graph from its plain form."""

    def __init__(self, plain: Mapping[str, Any], operators: Mapping[str, Operator]) -> None:
        self.operators = operators
        self.graph = graph = Graph(plain["name"], backend=plain["backend"])
        for name, at_most, value in plain["dims"]:
            graph.dims[name] = DimInfo(symbol=symbol(name), at_most=at_most, value=value)
        for name, options, value, *said in plain["choices"]:
            graph.choices[name] = Choice(name, tuple(options), value, *said)
        for name, over, tile in plain["knobs"]:
            graph.tiles[name], graph.knob_dims[name] = tile, symbol(over)
        self.regions: dict[str, Region] = {}
        for name, knob, over, parent, start, end in plain["regions"]:
            self.regions[name] = Region(
                name=name, knob=knob, over=symbol(over), rows=symbol(f"{knob}_rows"),
                parent=self.regions.get(parent), start=start, end=end,
            )  # fmt: skip
        graph.regions.extend(self.regions.values())
        for b in plain["buffers"]:
            graph.buffers.append(self._buffer(len(graph.buffers), *b))
        graph._names.update({b.name: b for b in graph.buffers})
        for a, root, offset in plain["aliases"]:
            graph.aliases[a] = (graph.buffers[root], self._dim(offset))
        for name, ids, start, end, source in plain["barriers"]:
            buffers = tuple(graph.buffers[b] for b in ids)
            graph.barriers.append(Barrier(name=name, buffers=buffers, start=start, end=end, source=source))
        graph.edges.extend(Edge(*e) for e in plain["edges"])
        for op in plain["ops"]:
            graph.ops.append(self._op(len(graph.ops), op))

    def _dim(self, terms: Any) -> Dim:
        if isinstance(terms, int):
            return terms
        return Polynomial((tuple(powers.items()), Fraction(n, d) if d > 1 else n) for n, d, powers in terms)

    def _buffer(
        self,
        number: int,
        name: str,
        kind: Any,
        shape: list[Any],
        dtype: str,
        home: str | None,
        tensor: str | None,
        rotate: int,
        source: str,
    ) -> Buffer:
        return Buffer(
            id=number, name=name, kind=kind, spec=Spec(tuple(self._dim(d) for d in shape), dtype),
            home=self.regions.get(home) if home else None, tensor=tensor, rotate=rotate, source=source,
        )  # fmt: skip

    def _op(self, index: int, plain: Mapping[str, Any]) -> Op:
        buffers = self.graph.buffers
        operands, attrs, inplace, rate = plain["rule"]
        name = plain["contract"]
        rule = self.graph.operators.get(name) or find(name, self.operators) or Operator(
            name=name, operands=operands, attrs=attrs, inplace=tuple((w, r) for w, r in inplace), rate=rate,
        )  # fmt: skip
        self.graph.operators[name] = rule
        return Op(
            index=index, name=plain["name"], operator=rule,
            operands={key: buffers[b] for key, b in plain["operands"].items()},
            reads=tuple(buffers[b] for b in plain["reads"]), writes=tuple(buffers[b] for b in plain["writes"]),
            attrs={key: self._dim(v["terms"]) if isinstance(v, dict) else v for key, v in plain["attrs"].items()},
            region=self.regions[plain["region"]] if plain["region"] else None, stream=plain["stream"],
            slices=tuple(Slice(*s) for s in plain["slices"]), inplace=rule.inplace_on(self.graph.backend),
            flops=self._dim(plain["flops"]),
            bytes=self._dim(plain["bytes"]), rate=plain["rate"], rate_rows=self._dim(plain["rate_rows"]),
            rate_columns=self._dim(plain["rate_columns"]), source=plain["source"],
        )  # fmt: skip
