"""Segments: runs of bound calls, and a table of what changes from one pass over them to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, TypeAlias

Arguments: TypeAlias = Mapping[str, Any]
_NOTHING: Final[Arguments] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call: `function` with the arguments that stay the same; `call` is both, on its stream."""

    op: int
    name: str
    stream: str
    function: Callable[..., object]
    arguments: Arguments
    call: Callable[..., object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Steps, run once per row; `tables` has a column of further arguments for each step, of which rows [first, last)."""

    steps: Sequence[Step]
    tables: Sequence[Sequence[Arguments]]
    first: int
    last: int

    def rows(self) -> Iterator[tuple[Arguments, ...]]:
        """Give the further arguments of all steps, row by row."""
        return islice(zip(*self.tables, strict=True), self.first, self.last)


@dataclass(slots=True)
class Lines:
    """The steps of a segment in the making, each with its column; `blank` is that of one without further arguments."""

    num_rows: int = 1
    steps: list[Step] = field(default_factory=list)
    tables: list[Sequence[Arguments]] = field(default_factory=list)
    blank: Sequence[Arguments] = ()

    def __post_init__(self) -> None:
        self.blank = (_NOTHING,) * self.num_rows

    def segment(self, first: int, last: int, *, skip: int = 0) -> Segment:
        return Segment(steps=tuple(self.steps[skip:]), tables=tuple(self.tables[skip:]), first=first, last=last)
