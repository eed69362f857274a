"""Sets of integers as spans: sorted, disjoint `[start, end)`, none empty, none touching the next."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

Span: TypeAlias = tuple[int, int]
Spans: TypeAlias = Sequence[Span]


_NO_HOLE: Final = (sys.maxsize, sys.maxsize)


def joined(spans: Iterable[Span]) -> list[Span]:
    """Sort spans that may overlap, touch or be empty, and join them.

    >>> joined([(5, 7), (0, 2), (2, 3), (4, 4)])
    [(0, 3), (5, 7)]
    """
    found: list[Span] = []
    for start, end in sorted(spans):
        if start >= end:
            continue
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def without(spans: Spans, holes: Spans) -> list[Span]:
    """Take `holes` out of `spans`, both sorted, in the time of a walk over them.

    >>> without([(0, 10), (12, 14)], [(3, 4), (9, 13)])
    [(0, 3), (4, 9), (13, 14)]
    """
    found: list[Span] = []
    left = iter(holes)
    hole = next(left, _NO_HOLE)
    for start, end in spans:
        while hole[1] <= start:
            hole = next(left, _NO_HOLE)
        while hole[0] < end:
            if hole[0] > start:
                found.append((start, hole[0]))
            start = max(start, hole[1])
            if hole[1] >= end:
                break
            hole = next(left, _NO_HOLE)
        if start < end:
            found.append((start, end))
    return found


def total(spans: Spans) -> int:
    """Count the integers.

    >>> total([(0, 3), (4, 9)])
    8
    """
    return sum(end - start for start, end in spans)


def inner_pages(holes: Spans, page: int) -> list[Span]:
    """Shrink holes to the whole pages inside them.

    >>> inner_pages([(1, 40), (41, 49)], 10)
    [(10, 40)]
    """
    return joined((-(-start // page) * page, end // page * page) for start, end in holes)
