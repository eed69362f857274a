"""Register a program with Mosaic: the DSL's calls in the order of the statements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mosaic.registrar.graph import Buffer, Graph

from .language import Alias, Beside, Body, Call, Choose, Declare, Keep, Loop, Mark, Program, Size, Wait, walk

__all__ = ["build", "register"]


def register(program: Program, name: str = "fuzz") -> Callable[[Mapping[str, str] | None], Graph]:
    """A function that builds the graph for given choices, as templates are compiled from."""

    def make(choices: Mapping[str, str] | None) -> Graph:
        g = Graph(name, backend="cpu", choices=choices)
        build(program, g)
        return g

    return make


def build(program: Program, g: Graph) -> None:
    """Register the program into a graph."""
    for name, dim in program.dims.items():
        g.dim(name, at_most=dim.at_most, value=dim.value if dim.fixed else None)
    for loop in walk(program.body):
        if isinstance(loop, Loop):  # only some choices may have it
            g.knob(loop.knob, over=g.dim(loop.dim), tile=loop.tile)
    _Builder(program, g).body(program.body)


class _Builder:
    def __init__(self, program: Program, g: Graph) -> None:
        self.program, self.g = program, g
        self.buffers: dict[str, Buffer] = {}
        self.marks: dict[str, int] = {}
        self.rows: dict[str, Any] = {}

    def body(self, body: Body) -> None:
        for s in body:
            match s:
                case Declare():
                    self.declare(s)
                case Call():
                    self.call(s)
                case Loop():
                    with self.g.chunk(s.knob, over=self.g.dim(s.dim), tile=s.tile, name=s.name) as rows:
                        self.rows[s.dim] = rows
                        self.body(s.body)
                        del self.rows[s.dim]
                case Beside():
                    with self.g.stream(s.stream):
                        self.body(s.body)
                case Wait():
                    self.g.wait(s.stream)
                case Mark():
                    self.marks[s.label] = self.g.mark()
                case Keep():
                    since = self.marks[s.since] if s.since is not None else None
                    self.g.add_barrier(*(self.buffers[name] for name in s.names), since=since)
                case Alias():
                    self.g.add_alias(self.buffers[s.name], self.buffers[s.of], offset=self.size(s.offset, False))
                case Choose():
                    self.body(s.options[self.g.choice(s.name, tuple(s.options))])

    def size(self, size: Size, inside: bool) -> Any:
        if isinstance(size, int):
            return size
        name, factor = size
        return (self.rows[name] if inside and name in self.rows else self.g.dim(name)) * factor

    def declare(self, s: Declare) -> None:
        inside = s.kind == "transient" and not s.outside
        shape = [self.size(size, inside) for size in s.shape]
        if s.kind in ("weight", "state"):
            make = self.g.weight if s.kind == "weight" else self.g.state
            more = {"tensor": s.name} if s.kind == "weight" else {}
            self.buffers[s.name] = make(s.name, shape, s.dtype, **more)
            return
        tensor = s.name if s.kind == "external" or (s.kind == "host" and s.fill) else None
        self.buffers[s.name] = self.g.buffer(
            s.name,
            shape,
            s.dtype,
            kind=s.kind,
            tensor=tensor,
            rotate=s.rotate,
            outside=s.outside,  # type: ignore[arg-type]
        )

    def call(self, s: Call) -> None:
        reads = [self.buffers[name] if name is not None else None for name in s.reads]
        out = [self.buffers[name] for name in s.writes] if s.into else None
        attrs = dict(s.attrs)
        name = "+".join(s.writes) or f"{s.kernel}@{s.reads[-1]}"
        results = self.g.add_op(s.kernel, *reads, out=out, name=name, **attrs)
        if s.writes and not s.into:
            made = results if isinstance(results, tuple) else (results,)
            self.buffers |= dict(zip(s.writes, made, strict=True))
