"""A graph as networkx, Graphviz and Mermaid: ops as boxes, buffers as arrows, regions as frames."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mosaic.errors import MissingExtra
from mosaic.registrar.graph import MAIN, Graph, Op, Region

if TYPE_CHECKING:
    import networkx as nx


def to_networkx(graph: Graph) -> nx.MultiDiGraph:
    """Return a graph of the ops, with an edge from the last writer of a buffer to each reader.

    Nodes carry `kernel`, `stream` and `region`, edges `buffer` and `shape`; weights and inputs are no nodes.

    Raises
    ------
    MissingExtra
        If networkx is not installed.
    """
    try:
        import networkx as nx
    except ImportError as error:
        raise MissingExtra("networkx", "viz", "a graph for networkx") from error
    found = nx.MultiDiGraph(name=graph.name)
    for op in graph.ops:
        found.add_node(op.name, kernel=op.operator.name, stream=op.stream, region=op.region.name if op.region else None)
    for source, target, name, shape in _flow(graph):
        found.add_edge(source.name, target.name, buffer=name, shape=shape)
    return found


def _flow(graph: Graph) -> Iterator[tuple[Op, Op, str, str]]:
    writer: dict[int, Op] = {}
    for op in graph.ops:
        for buffer in op.reads:
            if buffer.id in writer:
                yield writer[buffer.id], op, buffer.name, " x ".join(map(str, buffer.shape))
        for buffer in op.writes:
            writer[buffer.id] = op


def to_dot(graph: Graph) -> str:
    """Return Graphviz text; regions are clusters, side streams dashed.

    >>> from mosaic.models import load
    >>> to_dot(load("llada-8b").graph()).splitlines()[0]
    'digraph "full_step" {'
    """
    lines = [f"digraph {_quote(graph.name)} {{", "  rankdir=TB;", "  node [shape=box, fontname=Helvetica];"]
    lines += _dot_block(graph, None, "  ")
    for source, target, name, shape in _flow(graph):
        lines.append(f"  {_quote(source.name)} -> {_quote(target.name)} [label={_quote(_short(name) + ' ' + shape)}];")
    return "\n".join([*lines, "}"]) + "\n"


def _dot_block(graph: Graph, region: Region | None, indent: str) -> list[str]:
    lines = []
    for op in graph.ops:
        if op.region is region:
            style = "" if op.stream == MAIN else ", style=dashed"
            lines.append(f"{indent}{_quote(op.name)} [label={_quote(_label(op))}{style}];")
    for inner in graph.regions:
        if inner.parent is region:
            lines.append(f"{indent}subgraph {_quote('cluster_' + inner.name)} {{")
            lines.append(f"{indent}  label={_quote(_region_label(inner))};")
            lines += _dot_block(graph, inner, indent + "  ")
            lines.append(f"{indent}}}")
    return lines


def to_mermaid(graph: Graph) -> str:
    """Return Mermaid text; regions are subgraphs."""
    lines = ["flowchart TD", *_mermaid_block(graph, None, "  ")]
    for source, target, name, _ in _flow(graph):
        lines.append(f"  op{source.index} -->|{_plain(_short(name))}| op{target.index}")
    return "\n".join(lines) + "\n"


def _mermaid_block(graph: Graph, region: Region | None, indent: str) -> list[str]:
    lines = [f'{indent}op{op.index}["{_plain(_label(op))}"]' for op in graph.ops if op.region is region]
    for number, inner in enumerate(graph.regions):
        if inner.parent is region:
            lines.append(f'{indent}subgraph region{number}["{_plain(_region_label(inner))}"]')
            lines += _mermaid_block(graph, inner, indent + "  ")
            lines.append(f"{indent}end")
    return lines


def _label(op: Op) -> str:
    return op.name if op.name.endswith(op.operator.name) else f"{op.name} ({op.operator.name})"


def _region_label(region: Region) -> str:
    return f"{region.name}: chunks of {region.over}"


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _plain(text: str) -> str:
    return text.replace('"', "'").replace("|", "/")


def _short(name: str) -> str:
    return name.rsplit("/", 1)[-1]
