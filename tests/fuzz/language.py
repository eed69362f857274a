"""A small language of programs, so that one text can be registered with Mosaic, run by naive code, printed and shrunk.

A program knows nothing of Mosaic's graph: sizes are numbers or multiples of a dim, buffers are names, loops hold
statements. `building` registers it, `naive` runs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

Size: TypeAlias = "int | tuple[str, int]"
"""A number, or (dim, factor)."""
Shape: TypeAlias = tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class Dim:
    """A dim's value; `fixed` ones are given to the graph as well, `at_most` names the dim that bounds it."""

    value: int
    fixed: bool = False
    at_most: str | None = None


@dataclass(frozen=True, slots=True)
class Declare:
    """A buffer; `fill` says what its values are where the caller gives them."""

    name: str
    kind: str
    shape: Shape
    dtype: str
    fill: str = ""
    rotate: int = 1
    outside: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One op. `writes` are new buffers of `shapes`, or with `into` ones declared before; what the kernel updates it reads."""

    kernel: str
    reads: tuple[str | None, ...]
    writes: tuple[str, ...] = ()
    into: bool = False
    attrs: Mapping[str, Any] = field(default_factory=dict)
    shapes: tuple[Shape, ...] = ()


@dataclass(frozen=True, slots=True)
class Loop:
    name: str
    knob: str
    dim: str
    tile: int
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Beside:
    """Statements on a side stream."""

    stream: str
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    stream: str


@dataclass(frozen=True, slots=True)
class Mark:
    label: str


@dataclass(frozen=True, slots=True)
class Keep:
    """A barrier: the buffers live until here, from a mark on where one is named."""

    names: tuple[str, ...]
    since: str | None = None


@dataclass(frozen=True, slots=True)
class Alias:
    """`name` occupies the storage of `of` from byte `offset` on."""

    name: str
    of: str
    offset: Size = 0


@dataclass(frozen=True, slots=True)
class Choose:
    """A choice: what each option registers."""

    name: str
    options: Mapping[str, tuple[Statement, ...]]


Statement: TypeAlias = Declare | Call | Loop | Beside | Wait | Mark | Keep | Alias | Choose
Body: TypeAlias = tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """Dims and statements. Where `ordered`, the result depends on how loops are cut (a loop reads what it accumulates)."""

    dims: Mapping[str, Dim]
    body: Body
    ordered: bool = False
    steps: int = 1

    def value(self, size: Size) -> int:
        return size if isinstance(size, int) else self.dims[size[0]].value * size[1]


def walk(body: Sequence[Statement]) -> Iterator[Statement]:
    """Every statement, outer ones first; all options of a choice."""
    for statement in body:
        yield statement
        for inner in parts(statement):
            yield from walk(inner)


def parts(statement: Statement) -> tuple[Body, ...]:
    """The bodies that a statement holds."""
    if isinstance(statement, Loop | Beside):
        return (statement.body,)
    return tuple(statement.options.values()) if isinstance(statement, Choose) else ()


def with_parts(statement: Statement, bodies: Sequence[Body]) -> Statement:
    """The statement with other bodies."""
    if isinstance(statement, Loop | Beside):
        return replace(statement, body=bodies[0])
    assert isinstance(statement, Choose)
    return Choose(statement.name, dict(zip(statement.options, bodies, strict=True)))


def declarations(body: Sequence[Statement]) -> dict[str, Declare]:
    """The declarations by name, those of every option."""
    return {s.name: s for s in walk(body) if isinstance(s, Declare)}


# --- text -------------------------------------------------------------------------------------------------------------


def text_of(program: Program) -> str:
    """The program as one reads it."""
    dims = ", ".join(
        f"{name}={dim.value}" + (f" (at most {dim.at_most})" if dim.at_most else "")
        for name, dim in program.dims.items()
    )
    head = [f"# {dims}" + (", loops are ordered" if program.ordered else ""), *_lines(program.body, 0)]
    return "\n".join(head)


def _lines(body: Body, depth: int) -> Iterator[str]:
    pad = "    " * depth
    for s in body:
        if isinstance(s, Choose):
            for option, inner in s.options.items():
                yield f"{pad}if choice {s.name} is {option}:"
                yield from _lines(inner, depth + 1)
            continue
        yield pad + _line(s)
        for inner in parts(s):
            yield from _lines(inner, depth + 1)


def _line(s: Statement) -> str:
    match s:
        case Declare():
            extra = "".join(
                f", {k}={v}"
                for k, v in (("fill", s.fill), ("rotate", s.rotate), ("outside", s.outside))
                if v and v != 1
            )
            return f"{s.name} = {s.kind}({s.dtype}[{', '.join(map(_size, s.shape))}]{extra})"
        case Call():
            attrs = "".join(f", {key}={value}" for key, value in s.attrs.items())
            reads = ", ".join(map(str, s.reads))
            if s.into:
                return f"{s.kernel}({reads}{attrs}, out={', '.join(s.writes)})"
            return (f"{', '.join(s.writes)} = " if s.writes else "") + f"{s.kernel}({reads}{attrs})"
        case Loop():
            return f"for {s.name} in chunks({s.dim}, knob={s.knob}, tile={s.tile}):"
        case Beside():
            return f"beside on {s.stream}:"
        case Wait():
            return f"wait for {s.stream}"
        case Mark():
            return f"mark {s.label}"
        case Keep():
            return f"keep {', '.join(s.names)}" + (f" since {s.since}" if s.since else "")
        case Alias():
            return f"alias {s.name} -> {s.of} + {_size(s.offset)}"
    raise AssertionError(s)


def _size(size: Size) -> str:
    return str(size) if isinstance(size, int) else (size[0] if size[1] == 1 else f"{size[1]}*{size[0]}")
