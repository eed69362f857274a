"""Segments: runs of bound calls, with a table of the arguments that change between passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, TypeAlias

Arguments: TypeAlias = Mapping[str, Any]
_NOTHING: Final[Arguments] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call: `function` with its constant arguments; `call` is both, on its stream."""

    op: int
    name: str
    stream: str
    function: Callable[..., object]
    arguments: Arguments
    call: Callable[..., object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Steps that run once per row; `tables` has a column of varying arguments for each; rows [first, last) are used."""

    steps: Sequence[Step]
    tables: Sequence[Sequence[Arguments]]
    first: int
    last: int

    def rows(self) -> Iterator[tuple[Arguments, ...]]:
        """Give the varying arguments of all steps, row by row."""
        return islice(zip(*self.tables, strict=True), self.first, self.last)


@dataclass(slots=True)
class Lines:
    """The steps of an unfinished segment and their columns; `blank` is a column without varying arguments."""

    num_rows: int = 1
    steps: list[Step] = field(default_factory=list)
    tables: list[Sequence[Arguments]] = field(default_factory=list)
    blank: Sequence[Arguments] = ()

    def __post_init__(self) -> None:
        self.blank = (_NOTHING,) * self.num_rows

    def segment(self, first: int, last: int, *, skip: int = 0) -> Segment:
        return Segment(steps=tuple(self.steps[skip:]), tables=tuple(self.tables[skip:]), first=first, last=last)
