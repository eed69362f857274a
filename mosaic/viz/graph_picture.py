"""A picture of a graph without sizes: ops in program order, and a rail for every buffer.

Program order runs downwards, so a rail shows how long its buffer is alive. Layers that repeat are drawn once. Imports
matplotlib (extra `viz`) only when a picture is drawn, with Agg and without pyplot; knows no sizes and plans nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, Protocol

from mosaic.viz.charts import blank_figure, figure_png
from mosaic.viz.palette import COLORS, PEAK_COLOR

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from mosaic.registrar.parts import Buffer, DimInfo, Edge, Op, Region

_NUMBERED: Final = re.compile(r"((?:.*?/)?\w+)\.(\d+)(?=/)")  # "layers.3" of "layers.3/ffn/gate"
_MAIN: Final = "main"
_UNSEEN: Final = frozenset({"weight", "scratch"})  # every op has them; they would hide the flow
_RAILS: Final[Mapping[str, str]] = {
    "input": COLORS["inputs"], "state": "#B39B00", "output": COLORS["statistics"], "carry": COLORS["attention"],
    "transient": COLORS["hidden"],
}  # fmt: skip
_TINTS: Final = ("#E7F1EC", "#FBF0DC", "#E9EDF7", "#F7E8EF", "#EEF5D9", "#E6F4F7")
_INK, _FAINT, _LINE = "#333333", "#7A7A7A", "#C9C9C9"
_MOST_LISTED: Final = 3

# Lengths in inches: the axes cover the figure at one unit per inch, so that text and boxes agree.
_ROW: Final = 0.27
_BOX: Final = 0.21
_HEADER: Final = 0.24
_RAIL: Final = 0.17
_INSET: Final = 0.09
_CHARACTER: Final = 0.064  # of 8-point text, on average
_MARGIN: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """A loop or a repeated run of layers around rows [first, last]."""

    label: str
    first: int
    last: int
    depth: int
    tint: str | None


@dataclass(slots=True, kw_only=True)
class _Rail:
    """The accesses to one storage: the rows that write and read it."""

    name: str
    kind: str
    writes: set[int] = field(default_factory=set)
    reads: set[int] = field(default_factory=set)
    lane: int = 0

    @property
    def rows(self) -> set[int]:
        """Every row that touches it."""
        return self.writes | self.reads


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A line of the picture: an op, or a buffer that exists before the first op."""

    label: str
    note: str
    made: str
    stream: int  # 0 is the main one
    kind: str | None  # of the buffer, None for an op


class Drawn(Protocol):
    """The drawn parts of a graph."""

    name: str
    dims: dict[str, DimInfo]
    tiles: dict[str, int]
    ops: list[Op]
    buffers: list[Buffer]
    regions: list[Region]

    @property
    def edges(self) -> list[Edge]:
        """The edges that order ops of different streams."""

    def root(self, buffer: Buffer) -> Buffer:
        """Return the buffer whose storage this one occupies."""


def graph_png(graph: Drawn) -> bytes:
    """Return the picture of a graph as PNG bytes, as notebooks show it."""
    return figure_png(graph_figure(graph))


def graph_figure(graph: Drawn) -> Figure:
    """Draw ops as boxes in program order, loops as tinted frames, side streams in lanes of their own, buffers as rails.

    A rail starts at the op that writes the buffer (filled dot) and ends at the last reader (hollow dot). Aliases share
    the rail of their root. Weights and scratch are left out. Repeated layers are drawn once, marked `x N`.
    """
    return Picture(graph).draw()


# -- contents ------------------------------------------------------------------------------------------------------


def _repeats(graph: Drawn) -> Iterator[tuple[list[Op], int]]:
    """Runs of ops in order, each with its number of repetitions: layers of equal structure are one run."""
    layers = [(key, list(ops)) for key, ops in groupby(graph.ops, key=_layer)]
    at = 0
    while at < len(layers):
        key, ops = layers[at]
        count = 1
        if key is not None:
            shape = _structure(ops, key)
            while at + count < len(layers):
                other, more = layers[at + count]
                if other is None or other[0] != key[0] or _structure(more, other) != shape:
                    break
                count += 1
        yield ops, count
        at += count


def _layer(op: Op) -> tuple[str, str] | None:
    """The numbered scope of an op: ("layers", "3") of "layers.3/ffn/gate"; None outside."""
    found = _NUMBERED.match(op.name)
    return (found[1], found[2]) if found else None


def _structure(ops: Sequence[Op], key: tuple[str, str]) -> list[tuple[object, ...]]:
    """The key of a layer's look: names without the number, operators, operands' shapes, loops."""
    own = ".".join(key)
    return [
        (
            op.name.removeprefix(own), op.operator.name, op.stream, op.region.knob if op.region else None,
            tuple((name, b.spec.shape, b.dtype) for name, b in op.operands.items()),
        )
        for op in ops
    ]  # fmt: skip


class Picture:
    """Lays a graph out in rows and rails, then draws it."""

    def __init__(self, graph: Drawn) -> None:
        self.graph = graph
        self.streams = [_MAIN, *dict.fromkeys(op.stream for op in graph.ops if op.stream != _MAIN)]
        shown = {b.id for op in graph.ops for b in op.operands.values() if b.kind not in _UNSEEN}
        given = [b for b in graph.buffers if b.id in shown and b.kind in ("input", "state", "host", "external")]
        self.rows = [_Row(label=b.name, note=b.kind, made=_spec(b), stream=0, kind=b.kind) for b in given]
        self.row_of: dict[int, int] = {}  # op index -> row; ops of repeated layers share the first one's
        self.frames: list[_Frame] = []
        self._add_ops()
        self.rails = self._make_rails({b.id: row for row, b in enumerate(given)})
        self._place()

    def _add_ops(self) -> None:
        regions: dict[str, list[int]] = {}
        for ops, count in _repeats(self.graph):
            first = len(self.rows)
            scope = ".".join(_layer(ops[0]) or ())
            for op in ops:
                self.row_of[op.index] = len(self.rows)
                for region in op.region.chain if op.region is not None else ():
                    regions.setdefault(region.name, []).append(len(self.rows))
                self.rows.append(self._row(op, f"{scope}/" if scope else ""))
            for copy in range(1, count):
                for op in ops:
                    self.row_of[op.index + copy * len(ops)] = self.row_of[op.index]
            if scope:
                label = f"{scope} … {_last(scope, count)}   x {count}" if count > 1 else scope
                self.frames.append(_Frame(label=label, first=first, last=len(self.rows) - 1, depth=0, tint=None))
        tints = {knob: _TINTS[i % len(_TINTS)] for i, knob in enumerate(self.graph.tiles)}
        for region in self.graph.regions:
            if region.name in regions:
                rows = regions[region.name]
                self.frames.append(
                    _Frame(
                        label=_loop(region),
                        first=rows[0],
                        last=rows[-1],
                        depth=len(region.chain),
                        tint=tints[region.knob],
                    )
                )

    def _row(self, op: Op, scope: str) -> _Row:
        label = op.name.removeprefix(scope)
        kernel = op.operator.name
        return _Row(
            label=label, note="" if label.rsplit("/", 1)[-1] == kernel else kernel, made=_made(op, label.rsplit("/", 1)[-1]),
            stream=self.streams.index(op.stream), kind=None,
        )  # fmt: skip

    def _make_rails(self, given: Mapping[int, int]) -> list[_Rail]:
        """One rail per storage that a drawn op touches, in lanes packed from the left."""
        rails: dict[int, _Rail] = {}
        drawn = {row: index for index, row in reversed(self.row_of.items())}  # row -> the op it is drawn for
        for op in self.graph.ops:
            row = self.row_of[op.index]
            for buffers, write in ((op.reads, False), (op.writes, True)):
                for b in buffers:
                    root = self.graph.root(b)
                    if b.kind in _UNSEEN or (root.id not in rails and drawn[row] != op.index):
                        continue
                    rail = rails.setdefault(root.id, _Rail(name=root.name, kind=root.kind))
                    rail.kind = b.kind if b.kind == "output" else rail.kind
                    (rail.writes if write else rail.reads).add(row)
        for buffer, row in given.items():
            rails[buffer].writes.add(row)
        found = sorted(rails.values(), key=lambda rail: (min(rail.rows), -max(rail.rows)))
        ends: list[int] = []
        for rail in found:
            if rail.kind in ("output", "state"):
                rail.reads.add(len(self.rows))  # it holds its value when the step ends
            rail.lane = next((lane for lane, end in enumerate(ends) if end < min(rail.rows)), len(ends))
            ends[rail.lane : rail.lane + 1] = [max(rail.rows)]
        return found

    # -- layout -----------------------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Heights of the rows, with room for the frames' headers, and the columns from left to right."""
        self.y: list[float] = []
        at = 0.75
        for row in range(len(self.rows) + 1):
            opened = sum(frame.first == row for frame in self.frames)
            at += _HEADER * opened + (_INSET if opened else 0)
            self.y.append(at + _ROW / 2)
            at += _ROW + _INSET * sum(frame.last == row for frame in self.frames)
        self.height = at + _MARGIN
        depth = max((frame.depth for frame in self.frames), default=0)
        self.left = _MARGIN + _INSET * (depth + 1)
        widest = max(len(row.label) + (len(row.note) + 2 if row.note else 0) for row in self.rows)
        self.width_of_box = max(widest * _CHARACTER + 0.2, 1.6)
        self.rail_x = self.left + len(self.streams) * (self.width_of_box + 0.2) + 0.05
        lanes = 1 + max((rail.lane for rail in self.rails), default=0)
        self.made_x = self.rail_x + lanes * _RAIL + 0.1
        texts = max(len(row.made) for row in self.rows) * _CHARACTER
        headers = max((len(frame.label) for frame in self.frames), default=0) * _CHARACTER + self.left
        self.right = max(self.made_x + texts, headers, 5.0) + _INSET * (depth + 1)
        self.width = self.right + _MARGIN

    def box_x(self, stream: int) -> float:
        return self.left + stream * (self.width_of_box + 0.2)

    # -- drawing ----------------------------------------------------------------------------------------------------

    def draw(self) -> Figure:
        """Draw title, frames, rails, rows and edges, from the back to the front."""
        figure = blank_figure(self.width, self.height, layout=None)
        axes: Axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_xlim(0, self.width)
        axes.set_ylim(self.height, 0)
        axes.axis("off")
        self._draw_title(axes)
        for frame in sorted(self.frames, key=lambda frame: frame.depth):
            self._draw_frame(axes, frame)
        self._draw_rails(axes)
        for number, row in enumerate(self.rows):
            self._draw_row(axes, number, row)
        self._draw_edges(axes)
        return figure

    def _draw_title(self, axes: Axes) -> None:
        g = self.graph
        hidden = len(g.ops) - sum(row.kind is None for row in self.rows)
        folded = f", {hidden} of them folded into repeats" if hidden else ""
        axes.text(_MARGIN, 0.28, g.name, fontsize=12, weight="bold", color=_INK, va="center")
        facts = f"{len(g.ops)} ops{folded}; dims {', '.join(g.dims) or 'none'}"
        axes.text(_MARGIN, 0.5, facts, fontsize=8, color=_FAINT, va="center")
        x = self.right
        for kind in reversed(list(_RAILS)):
            if any(rail.kind == kind for rail in self.rails):
                axes.text(x, 0.28, kind, fontsize=8, color=_RAILS[kind], va="center", ha="right")
                x -= len(kind) * _CHARACTER + 0.14
        axes.text(self.right, 0.5, "● written   ○ read   ↻ updated", fontsize=7, color=_FAINT, va="center", ha="right")

    def _draw_frame(self, axes: Axes, frame: _Frame) -> None:
        inset = _INSET * frame.depth
        opened = [f for f in self.frames if f.first == frame.first and f.depth > frame.depth]
        closed = [f for f in self.frames if f.last == frame.last and f.depth > frame.depth]
        top = self.y[frame.first] - _ROW / 2 - _HEADER * (1 + len(opened))
        bottom = self.y[frame.last] + _ROW / 2 + _INSET * (0.6 + len(closed))
        left, right = _MARGIN + inset, self.right - inset
        style: dict[str, Any] = {
            "facecolor": frame.tint or "none",
            "edgecolor": _LINE,
            "zorder": 0.1 + frame.depth * 0.01,
        }
        axes.fill(
            [left, right, right, left],
            [top, top, bottom, bottom],
            linewidth=0.8,
            linestyle="-" if frame.tint else "--",
            **style,
        )
        axes.text(
            left + 0.07, top + _HEADER / 2, frame.label, fontsize=7.5, color=_INK, va="center", style="italic", zorder=1
        )

    def _draw_rails(self, axes: Axes) -> None:
        for rail in self.rails:
            x, color = self.rail_x + rail.lane * _RAIL, _RAILS.get(rail.kind, _INK)
            low, high = min(rail.rows), max(rail.rows)
            axes.plot([x, x], [self.y[low], self.y[high]], color=color, linewidth=2.0, zorder=2, solid_capstyle="round")
            for row in rail.reads - rail.writes - {len(self.rows)}:
                axes.plot(x, self.y[row], "o", markersize=4.5, markerfacecolor="white", markeredgecolor=color, zorder=4)
            for row in rail.writes:
                axes.plot(x, self.y[row], "o", markersize=4.8, color=color, zorder=4)
            if len(self.rows) in rail.reads:
                axes.plot(x, self.y[-1], "v", markersize=5, color=color, zorder=4)

    def _draw_row(self, axes: Axes, number: int, row: _Row) -> None:
        x, y = self.box_x(row.stream), self.y[number]
        left, right = x, x + self.width_of_box
        ends = [self.rail_x + rail.lane * _RAIL for rail in self.rails if number in rail.rows]
        if ends:
            axes.plot([right, max(ends)], [y, y], color=_LINE, linewidth=0.8, zorder=1.5)
        given = row.kind is not None
        face, edge = ("#F2EEF8" if row.kind == "input" else "#FBF8DC", "none") if given else ("white", PEAK_COLOR)
        ys = [y - _BOX / 2, y - _BOX / 2, y + _BOX / 2, y + _BOX / 2]
        linestyle = "-" if row.stream == 0 else "--"
        axes.fill(
            [left, right, right, left], ys, facecolor=face, edgecolor=edge, linewidth=0.8, linestyle=linestyle, zorder=3
        )
        axes.text(left + 0.07, y, row.label, fontsize=8, color=_INK, va="center_baseline", zorder=5)
        if row.note:
            axes.text(right - 0.07, y, row.note, fontsize=7, color=_FAINT, va="center_baseline", ha="right", zorder=5)
        axes.text(self.made_x, y, row.made, fontsize=7.5, color=_FAINT, va="center_baseline", zorder=5)

    def _draw_edges(self, axes: Axes) -> None:
        """Forks and joins of the side streams."""
        for edge in self.graph.edges:
            source, target = self.row_of[edge.source], self.row_of[edge.target]
            to_side = edge.kind == "fork"
            stream = self.rows[target if to_side else source].stream
            x_main, x_side = self.box_x(0) + self.width_of_box * 0.85, self.box_x(stream) + self.width_of_box * 0.12
            start, end = (x_main, x_side) if to_side else (x_side, x_main)
            axes.annotate(
                "", (end, self.y[target] - _BOX / 2), (start, self.y[source] + _BOX / 2), zorder=6,
                arrowprops={"arrowstyle": "-|>", "color": COLORS["attention"], "linewidth": 1.2, "linestyle": "--"},
            )  # fmt: skip


def _last(scope: str, count: int) -> str:
    """The number of the last of `count` layers from `scope` on."""
    return str(int(scope.rsplit(".", 1)[-1]) + count - 1)


def _loop(region: Region) -> str:
    return f"{region.name.rsplit('/', 1)[-1]}: chunks of {region.over}"


def _spec(buffer: Buffer) -> str:
    return f"{buffer.dtype} [{', '.join(map(str, buffer.shape))}]"


def _made(op: Op, label: str) -> str:
    """The writes of an op: shapes, with names if they are not the op's own, and a sign before updates."""
    updated = [op.operands[name] for name in op.operator.updates if name in op.operands]
    created = [b for b in op.writes if b.kind not in _UNSEEN and b not in updated]
    return ",  ".join([*_listed(created, "", label), *_listed(updated, "↻ ", label)])


def _listed(buffers: Sequence[Buffer], sign: str, label: str) -> Iterable[str]:
    names = [_short(b).removeprefix(f"{label}.") for b in buffers]
    if len(buffers) > _MOST_LISTED:
        return [sign + ", ".join(names)]
    return [f"{sign}{'' if name == label else name + ' '}{_spec(b)}" for name, b in zip(names, buffers, strict=True)]


def _short(buffer: Buffer) -> str:
    return buffer.name.rsplit("/", 1)[-1]
