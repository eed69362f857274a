"""The offset-assignment problem and its answer, stated in types.

Times are integers in op index (or any unit), lifetimes half-open `[start, end)`; sizes and offsets are bytes, addresses
half-open `[offset, offset + size)`. Two buffers that hold a value at the same time must not share an address. Everything is a
Python int: bytes never pass through a float.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import index, le, lt

from mosaic.errors import UsageError

from .sweep import first_common

BufferId = int | str
Interval = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Buffers to place, one column per property; row `i` of every column is buffer `ids[i]`.

    Construction costs some 0.1 ms for 600 plain buffers: any sequence of ints will do for a column.

    Parameters
    ----------
    sizes : sequence of int
        Bytes, at least 0. A buffer of 0 bytes conflicts with nothing.
    starts, ends : sequence of int
        Half-open lifetimes, `start < end`.
    ids : sequence of int or str, optional
        Unique names; `0 .. n-1` if left out.
    gaps : sequence of interval tuples, optional
        Per buffer the half-open parts of its lifetime in which it holds no value, ascending and disjoint;
        its space is free for others then.
    alignments : sequence of int or one int
        Bytes that the offset must be a multiple of.
    pins : sequence of int or None, optional
        Offsets that are given; None where the solver chooses.
    aliases : mapping of id to (id, int), optional
        `{member: (root, byte_offset)}`: the member lies in the root's storage at that distance. A group is placed as
        one block whose size covers all members and which is live whenever one of them is.
    capacity : int, optional
        Bytes available; a bound to reach, not a constraint that solvers fail on.

    Raises
    ------
    UsageError
        Columns of different lengths, a negative size, an empty lifetime, a duplicate id, a gap outside its lifetime,
        gaps that leave nothing of it, an alignment below 1, a pin that is negative, misaligned or overlaps another, an
        alias that points nowhere or in a circle. The message holds the numbers.

    Examples
    --------
    >>> problem = Problem(sizes=[4, 4, 8], starts=[0, 1, 2], ends=[2, 3, 4])
    >>> lower_bound(problem)
    12
    """

    sizes: Sequence[int]
    starts: Sequence[int]
    ends: Sequence[int]
    ids: Sequence[BufferId] = ()
    gaps: Sequence[Sequence[Interval]] | None = None
    alignments: Sequence[int] | int = 1
    pins: Sequence[int | None] | None = None
    aliases: Mapping[BufferId, tuple[BufferId, int]] = field(default_factory=dict)
    capacity: int | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "sizes", integers("size", self.sizes))
        put(self, "starts", integers("start", self.starts))
        put(self, "ends", integers("end", self.ends))
        n = len(self.sizes)
        put(self, "ids", tuple(self.ids) if len(self.ids) else tuple(range(n)))
        for name in ("starts", "ends", "ids"):
            _same_length(name, len(getattr(self, name)), n)
        self._check_columns()
        if isinstance(self.alignments, int):
            _check_alignment(self.alignments, "all buffers")
        else:
            put(self, "alignments", integers("alignment", self.alignments))
            _same_length("alignments", len(self.alignments), n)
            for buffer, alignment in zip(self.ids, self.alignments, strict=True):
                _check_alignment(alignment, f"buffer {buffer!r}")
        if self.gaps is not None:
            put(self, "gaps", self._checked_gaps(self.gaps))
        if self.aliases:
            self._check_aliases()
        if self.pins is not None:
            put(self, "pins", tuple(None if pin is None else index(pin) for pin in self.pins))
            self._check_pins()
        if self.capacity is not None and self.capacity < 0:
            raise UsageError(f"capacity is {self.capacity} bytes; it must be at least 0")

    def __len__(self) -> int:
        return len(self.sizes)

    def alignment(self, row: int) -> int:
        """Return the alignment of a row in bytes."""
        return self.alignments if isinstance(self.alignments, int) else self.alignments[row]

    def _check_columns(self) -> None:
        if self.sizes and min(self.sizes) < 0:
            row = next(i for i, size in enumerate(self.sizes) if size < 0)
            raise UsageError(f"buffer {self.ids[row]!r} has a size of {self.sizes[row]} bytes; it must be at least 0")
        if not all(map(lt, self.starts, self.ends)):
            row = next(i for i in range(len(self)) if self.starts[i] >= self.ends[i])
            raise UsageError(
                f"buffer {self.ids[row]!r} has an empty lifetime [{self.starts[row]}, {self.ends[row]}); "
                "the end must be larger than the start (half-open)"
            )
        if len(set(self.ids)) != len(self):
            seen: set[BufferId] = set()
            twice = next(b for b in self.ids if b in seen or seen.add(b))  # type: ignore[func-returns-value]
            raise UsageError(f"id {twice!r} occurs more than once; ids must be unique")

    def _checked_gaps(self, gaps: Sequence[Sequence[Interval]]) -> tuple[tuple[Interval, ...], ...]:
        _same_length("gaps", len(gaps), len(self))
        checked = tuple(tuple((index(a), index(b)) for a, b in row) for row in gaps)
        for row, intervals in enumerate(checked):
            edges = [self.starts[row], *(t for gap in intervals for t in gap), self.ends[row]]
            if not all(map(le, edges, edges[1:])) or any(a >= b for a, b in intervals):
                raise UsageError(
                    f"buffer {self.ids[row]!r}: gaps {list(intervals)} are not ascending, disjoint, non-empty parts of "
                    f"its lifetime [{self.starts[row]}, {self.ends[row]})"
                )
            if sum(b - a for a, b in intervals) == self.ends[row] - self.starts[row]:
                raise UsageError(
                    f"buffer {self.ids[row]!r}: gaps {list(intervals)} leave nothing of its lifetime "
                    f"[{self.starts[row]}, {self.ends[row]}); leave the buffer out"
                )
        return checked

    def _check_aliases(self) -> None:
        rows = {buffer: row for row, buffer in enumerate(self.ids)}
        for member, (root, distance) in self.aliases.items():
            for buffer in (member, root):
                if buffer not in rows:
                    raise UsageError(f"alias {member!r} -> {root!r}: there is no buffer {buffer!r}")
            if distance < 0:
                raise UsageError(f"alias {member!r} -> {root!r}: byte offset {distance} must be at least 0")
            at, steps, total = member, 0, 0
            while at in self.aliases:
                at, step = self.aliases[at]
                total, steps = total + step, steps + 1
                if steps > len(self.aliases):
                    raise UsageError(f"alias {member!r} -> {root!r} leads back to itself; one buffer must be the root")
            alignment = self.alignment(rows[member])
            if total % alignment:
                raise UsageError(
                    f"alias {member!r} lies {total} bytes into {at!r}, not a multiple of its alignment {alignment}"
                )

    def _check_pins(self) -> None:
        assert self.pins is not None
        _same_length("pins", len(self.pins), len(self))
        for row, pin in enumerate(self.pins):
            if pin is None:
                continue
            if pin < 0 or pin % self.alignment(row):
                raise UsageError(
                    f"buffer {self.ids[row]!r} is pinned at {pin}; "
                    f"it must be a multiple of {self.alignment(row)}, at least 0"
                )
        if clash := first_clash(self, list(self.pins)):
            raise UsageError(f"pinned buffers overlap: {clash}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Offsets for a problem and what is known about them.

    Parameters
    ----------
    offsets : tuple of int
        Bytes, in the problem's row order.
    peak_bytes, lower_bound_bytes : int
        The largest `offset + size`, and the largest live set, which no assignment can be below.
    optimal : bool
        True if the peak equals the lower bound (a certificate that anyone can check) or if an exhaustive search
        refuted every smaller peak.
    solver : str
        The solver that found the offsets.
    seconds : float
        Wall time if a `timeout_s` was given; else 0.0, since the planner never reads the clock.
    proven_bound_bytes : int
        The largest value below which no peak can lie, by the lower bound or by exhaustion.
    history : tuple of (float, int)
        Each improvement: seconds (0.0 without a timeout) and peak.
    """

    offsets: tuple[int, ...]
    peak_bytes: int
    lower_bound_bytes: int
    optimal: bool
    solver: str
    seconds: float = field(default=0.0, compare=False)
    capacity: int | None = None
    proven_bound_bytes: int = 0
    history: tuple[tuple[float, int], ...] = field(default=(), compare=False, repr=False)

    @property
    def capacity_reached(self) -> bool:
        """True if no capacity was given or the peak is within it."""
        return self.capacity is None or self.peak_bytes <= self.capacity

    @property
    def infeasible(self) -> bool:
        """True if it is proven that nothing fits the capacity."""
        return self.capacity is not None and max(self.lower_bound_bytes, self.proven_bound_bytes) > self.capacity


def lower_bound(problem: Problem) -> int:
    """Return the largest live set in bytes (or the highest pinned end, if larger).

    An alias group counts once, with the size that covers its members; a buffer counts nothing in its gaps.
    O(n log n).

    Examples
    --------
    >>> lower_bound(Problem(sizes=[4, 4], starts=[0, 2], ends=[2, 4]))
    4
    """
    if problem.aliases or problem.gaps is not None or problem.pins is not None:
        rectangles = list(_rectangles(problem))
        pinned = max((pin + size for _, size, pin, _ in rectangles if pin is not None), default=0)
        spans = [(s, e, size) for _, size, _, pieces in rectangles for s, e in pieces]
        return max(pinned, largest_load([s[0] for s in spans], [s[1] for s in spans], [s[2] for s in spans]))
    return largest_load(problem.starts, problem.ends, problem.sizes)


def largest_load(starts: Sequence[int], ends: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the largest sum of sizes over intervals `[start, end)` that share a point."""
    change: dict[int, int] = {}
    get = change.get
    for start, end, size in zip(starts, ends, sizes, strict=True):
        change[start] = get(start, 0) + size
        change[end] = get(end, 0) - size
    return max(accumulate([change[time] for time in sorted(change)]), default=0)


def integers(what: str, column: Sequence[int]) -> tuple[int, ...]:
    """Return a column as Python's integers; UsageError names what is none."""
    values = tuple(column)
    if set(map(type, values)) <= {int}:
        return values
    try:
        return tuple(map(index, values))
    except TypeError as error:
        bad = next(v for v in values if not hasattr(v, "__index__"))
        raise UsageError(f"a {what} is {bad!r}; bytes and times are integers, never floats") from error


def _same_length(name: str, got: int, expected: int) -> None:
    if got != expected:
        raise UsageError(f"column {name} has {got} rows, sizes has {expected}; they must be the same")


def _check_alignment(alignment: int, who: str) -> None:
    if alignment < 1:
        raise UsageError(f"alignment of {who} is {alignment}; it must be at least 1 byte")


def _occupied(problem: Problem, row: int) -> list[Interval]:
    """Return the lifetime of a row without its gaps."""
    gaps = problem.gaps[row] if problem.gaps is not None else ()
    if not gaps:
        return [(problem.starts[row], problem.ends[row])]
    edges = [problem.starts[row], *(t for gap in gaps for t in gap), problem.ends[row]]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def united(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as ascending disjoint ones; touching ones are joined."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def groups_of(problem: Problem) -> tuple[list[int], list[int]]:
    """Return for each row its alias root and its distance from it in bytes (itself and 0 without an alias)."""
    n = len(problem)
    if not problem.aliases:
        return list(range(n)), [0] * n
    rows = {buffer: row for row, buffer in enumerate(problem.ids)}
    roots, distances = [0] * n, [0] * n
    for row, buffer in enumerate(problem.ids):
        at, total = buffer, 0
        while at in problem.aliases:
            at, step = problem.aliases[at]
            total += step
        roots[row], distances[row] = rows[at], total
    return roots, distances


def _rectangles(
    problem: Problem, pins: Sequence[int | None] | None = None
) -> Iterable[tuple[int, int, int | None, list[Interval]]]:
    """Yield (root row, size, pinned offset of the root, occupied intervals) of each alias group, by root row.

    Raises UsageError where two members of a group pin it to different places.
    """
    pins = pins if pins is not None else problem.pins
    if not problem.aliases:  # every buffer is its own group
        for row, size in enumerate(problem.sizes):
            yield row, size, pins[row] if pins is not None else None, _occupied(problem, row)
        return
    roots, distances = groups_of(problem)
    members: dict[int, list[int]] = {}
    for row, root in enumerate(roots):
        members.setdefault(root, []).append(row)
    for root in sorted(members):
        size = max(distances[row] + problem.sizes[row] for row in members[root])
        pieces = united(piece for row in members[root] for piece in _occupied(problem, row))
        places = {pins[row] - distances[row] for row in members[root] if pins[row] is not None} if pins else set()  # type: ignore[operator]
        if len(places) > 1 or min(places, default=0) < 0:
            raise UsageError(f"the alias group of buffer {problem.ids[root]!r} is pinned to offsets {sorted(places)}")
        yield root, size, next(iter(places), None), pieces


def rectangles(problem: Problem) -> list[tuple[int, int, int | None, list[Interval]]]:
    """Return (root row, size, pin, occupied intervals) of each alias group, by root row."""
    return list(_rectangles(problem))


def group_alignments(problem: Problem) -> list[int]:
    """Return for each row the least common multiple of the alignments in its alias group."""
    roots, _ = groups_of(problem)
    common = [1] * len(problem)
    for row, root in enumerate(roots):
        common[root] = math.lcm(common[root], problem.alignment(row))
    return [common[root] for root in roots]


def first_clash(problem: Problem, offsets: Sequence[int | None]) -> str | None:
    """Return a sentence about two groups that overlap in time and address, or None; rows at None are left out."""
    try:
        placed = [block for block in _rectangles(problem, offsets) if block[2] is not None]
    except UsageError as error:
        return str(error)
    boxes = [(start, end, low, low + size, row) for row, size, low, p in placed if low is not None for start, end in p]
    starts, ends, lows, tops, rows = zip(*boxes, strict=True) if boxes else ((),) * 5
    found = first_common(starts, ends, lows, tops)
    if found is None:
        return None
    one, other = found
    return (
        f"buffers {problem.ids[rows[one]]} and {problem.ids[rows[other]]} are live together from {starts[other]} and "
        f"overlap: [{lows[one]}, {tops[one]}) and [{lows[other]}, {tops[other]})"
    )
