"""Solvers do what they are defined to do: first fit, best fit, skyline and the rest, byte by byte and time by time.

The definitions here look at every offset and every point of time; nothing is sorted, cut into sections or kept.
"""

from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import accumulate, product
from typing import Any

import pytest
from offset_instances import perfect

from mosaic.planner.offsets import Blocks, Problem, blocks_of, compiled, kernels, lower_bound
from mosaic.planner.offsets.blocks import paced
from mosaic.planner.offsets.greedy import greedy_by_area, greedy_by_conflicts, greedy_by_size, place_in_order
from mosaic.planner.offsets.layout import Layout, layout_of
from mosaic.planner.offsets.local_search import LocalSearch
from mosaic.planner.offsets.neighbours import Neighbours
from mosaic.planner.offsets.online import best_fit, first_fit, place_online, program_order
from mosaic.planner.offsets.skyline import PREORDERS, preorder, skyline

SEEDS = range(120)


def any_problem(seed: int, *, most: int = 12) -> Problem:
    """Draw a problem in which every feature is there now and then: gaps, alignments, pins, aliases, empty buffers."""
    draw = random.Random(seed)
    n = draw.randrange(1, most + 1)
    starts = [draw.randrange(-3, 9) for _ in range(n)]
    ends = [start + draw.randrange(1, 9) for start in starts]
    sizes = [draw.randrange(0 if draw.random() < 0.2 else 1, 10) for _ in range(n)]
    for row in range(1, n):
        if draw.random() < 0.2:
            starts[row], ends[row], sizes[row] = starts[row - 1], ends[row - 1], sizes[row - 1]
    gaps = None
    if draw.random() < 0.4:
        gaps = [random_gaps(draw, start, end) for start, end in zip(starts, ends, strict=True)]
    alignments = draw.choice((1, 1, 2, 4, [draw.choice((1, 2, 3, 4)) for _ in range(n)]))
    if draw.random() < 0.3:
        sizes = [4 * size for size in sizes]
    aliased = draw.random() < 0.3
    aliases: dict[int | str, tuple[int | str, int]] = {
        row: (draw.randrange(row), 12 * draw.randrange(2)) for row in range(1, n) if aliased and draw.random() < 0.3
    }
    problem = Problem(
        sizes=sizes, starts=starts, ends=ends, gaps=gaps, alignments=alignments, aliases=aliases, capacity=seed
    )
    if draw.random() < 0.4:
        placed = naive_order(problem, sorted(range(n), key=lambda _: draw.random()))
        shift = 12 * draw.randrange(2)
        pins = [at + shift if draw.random() < 0.3 else None for at in placed]
        problem = Problem(
            sizes=sizes, starts=starts, ends=ends, gaps=gaps, alignments=alignments, pins=pins, aliases=aliases
        )
    return problem


def random_gaps(draw: random.Random, start: int, end: int) -> list[tuple[int, int]]:
    """Draw gaps, some of which touch the ends of the lifetime; a lifetime is never all gap."""
    cuts = sorted(draw.sample(range(start, end + 1), min(2 * draw.randrange(3), (end - start + 1) // 2 * 2)))
    gaps = list(zip(cuts[::2], cuts[1::2], strict=True))
    return gaps if sum(b - a for a, b in gaps) < end - start else []


def times_of(problem: Problem, row: int) -> set[int]:
    """Return the points of time in which a buffer holds a value."""
    times = set(range(problem.starts[row], problem.ends[row]))
    for start, end in problem.gaps[row] if problem.gaps is not None else ():
        times -= set(range(start, end))
    return times


def root_of(problem: Problem, row: int) -> tuple[int, int]:
    """Return the root of a buffer's alias group, and the distance from it."""
    if row not in problem.aliases:
        return row, 0
    parent, distance = problem.aliases[row]
    assert isinstance(parent, int)
    root, further = root_of(problem, parent)
    return root, distance + further


class Group:
    """An alias group, from its definition."""

    def __init__(self, problem: Problem, root: int) -> None:
        members = [(row, root_of(problem, row)[1]) for row in range(len(problem)) if root_of(problem, row)[0] == root]
        self.root = root
        self.size = max(distance + problem.sizes[row] for row, distance in members)
        self.times = {time for row, _ in members for time in times_of(problem, row)}
        self.alignment = math.lcm(*(problem.alignment(row) for row, _ in members))
        pins = [(problem.pins[row], distance) for row, distance in members] if problem.pins is not None else []
        self.pin = next((pin - distance for pin, distance in pins if pin is not None), None)


def groups(problem: Problem) -> list[Group]:
    return [Group(problem, row) for row in range(len(problem)) if row not in problem.aliases]


def naive_order(problem: Problem, order: Sequence[int]) -> list[int]:
    """Place whole groups in the order of their roots, each at the lowest offset that is free; return buffers' offsets."""
    placed: dict[int, int] = {}
    by_root = {group.root: group for group in groups(problem)}
    for root in [row for row in order if row in by_root]:
        group, offset = by_root[root], 0
        while offset % group.alignment or any(
            by_root[other].times & group.times
            and offset < at + by_root[other].size
            and at < offset + group.size
            and by_root[other].size
            and group.size
            for other, at in placed.items()
        ):
            offset += 1
        placed[root] = offset
    return [placed[root] + distance for root, distance in (root_of(problem, row) for row in range(len(problem)))]


def sections_of(times: Sequence[set[int]]) -> list[int]:
    """Return a point of time just before the first end that follows each start: one for every maximal live set."""
    found, opened = [], False
    for time in range(-20, 60):
        opened = opened or any(time in own and time - 1 not in own for own in times)
        if opened and any(time in own and time + 1 not in own for own in times):
            found.append(time)
            opened = False
    return found


def times(blocks: Blocks) -> list[set[int]]:
    return [{t for start, end in blocks.pieces_of(row) for t in range(start, end)} for row in range(len(blocks))]


def test_blocks_are_the_groups_that_have_bytes() -> None:
    for seed in SEEDS:
        problem = any_problem(seed)
        blocks = blocks_of(problem)
        kept = [group for group in groups(problem) if group.size]
        lived = [group.times for group in kept]
        n = range(len(kept))
        assert times(blocks) == lived and blocks.capacity == problem.capacity
        assert blocks.sizes == [group.size for group in kept]
        assert blocks.starts == [min(own) for own in lived] and blocks.ends == [max(own) + 1 for own in lived]
        assert blocks.lengths == [len(own) for own in lived]
        assert (blocks.pieces is None) == all(max(own) - min(own) + 1 == len(own) for own in lived)
        for row in n:
            assert all(a < b for a, b in blocks.pieces_of(row))
            ends, starts = [b for _, b in blocks.pieces_of(row)], [a for a, _ in blocks.pieces_of(row)]
            assert all(end < start for end, start in zip(ends, starts[1:], strict=False))  # those that touch are one
        pins = [group.pin for group in kept]
        assert blocks.pins == (pins if any(pin is not None for pin in pins) else None)
        numbers = [*blocks.sizes, *(pin for pin in pins if pin is not None)]
        steps = [group.alignment for group in kept]
        needed = any(number % step for number in numbers for step in steps)
        assert blocks.alignments == (steps if needed else None)
        assert blocks.plain == (blocks.pieces is None and blocks.pins is None and not needed)
        loads = [sum(group.size for group in kept if time in group.times) for time in range(-5, 20)]
        pinned = [group.pin + group.size for group in groups(problem) if group.pin is not None]
        assert blocks.lower_bound == lower_bound(problem) == max([*loads, *pinned])
        assert blocks.conflicts == [
            [other for other in n if other != row and lived[row] & lived[other]] for row in n
        ] or (
            blocks.pieces is None  # there the order is by start
        )
        assert [set(near) for near in blocks.conflicts] == [{o for o in n if o != r and lived[r] & lived[o]} for r in n]
        assert all(len(set(near)) == len(near) for near in blocks.conflicts)
        assert all(blocks.meet(row, other) == bool(lived[row] & lived[other]) for row in n for other in n)
        hulls = list(zip(blocks.starts, blocks.ends, strict=True))
        assert blocks.num_pairs == sum(
            hulls[a][0] < hulls[b][1] and hulls[b][0] < hulls[a][1] for a in n for b in range(a)
        )
        near_pins = None
        if blocks.pins is not None:
            near_pins = [[o for p, o in sorted((p, o) for o, p in enumerate(pins) if p is not None)
                          if o != row and lived[row] & lived[o]] for row in n]  # fmt: skip
        assert blocks.neighbour_pins == near_pins
        cuts = sections_of(lived)
        assert blocks.sections.count == len(cuts)
        for row in n:
            inside = [at for a, b in blocks.sections.spans[row] for at in range(a, b)]
            assert inside == [at for at, time in enumerate(cuts) if time in lived[row]]
            assert len(blocks.sections.spans[row]) == len(blocks.pieces_of(row))


def test_offsets_of_blocks_are_those_of_their_buffers() -> None:
    for seed in SEEDS:
        problem = any_problem(seed)
        blocks = blocks_of(problem)
        draw = random.Random(seed)
        roots = [group.root for group in groups(problem) if group.size]
        at = {root: draw.randrange(99) for root in roots}
        for group in groups(problem):
            if not group.size:
                at[group.root] = group.pin or 0
        assert blocks.expand([at[root] for root in roots]) == tuple(
            at[root] + distance for root, distance in (root_of(problem, row) for row in range(len(problem)))
        )
        assert blocks.peak([at[root] for root in roots]) == max(
            (at[group.root] + group.size for group in groups(problem) if group.size), default=0
        )


def lifted(blocks: Blocks, row: int, offset: int) -> int:
    """Return the first offset from this one on that is aligned and free of pinned blocks, trying each byte."""
    lived = times(blocks)
    step = blocks.alignments[row] if blocks.alignments is not None else 1
    pinned = [(p, o) for o, p in enumerate(blocks.pins or ()) if p is not None and o != row and lived[o] & lived[row]]
    while offset % step or any(offset < p + blocks.sizes[o] and p < offset + blocks.sizes[row] for p, o in pinned):
        offset += 1
    return offset


def test_a_block_is_lifted_over_pins_byte_by_byte() -> None:
    for seed in SEEDS:
        blocks = blocks_of(any_problem(seed))
        layout = layout_of(blocks)
        fixed, free = layout.columns, layout.rows
        for row in range(len(blocks)):
            for offset in range(0, 40, 3):
                expected = lifted(blocks, row, offset)
                assert blocks.lift(row, offset) == expected
                if row in free:
                    i = free.index(row)
                    pins = [fixed[name] for name in ("pin_cuts", "pin_low", "pin_top")]
                    assert kernels.lifted(i, offset, blocks.sizes[row], fixed["alignments"][i], *pins) == expected


def naive_place(blocks: Blocks, order: Sequence[int], *, best: bool) -> list[int]:
    """Place pinned blocks, then the others in order: in the lowest hole, or in the one with the least room."""
    lived, placed = times(blocks), dict[int, int]()
    if blocks.pins is not None:
        placed = {row: pin for row, pin in enumerate(blocks.pins) if pin is not None}
    for row in order:
        if row in placed:
            continue
        size, step = blocks.sizes[row], blocks.alignments[row] if blocks.alignments is not None else 1
        used = {b for o, at in placed.items() if lived[o] & lived[row] for b in range(at, at + blocks.sizes[o])}
        holes, byte, high = [], 0, max(used, default=-1) + 1
        while byte < high:
            if byte in used:
                byte += 1
                continue
            begin = byte
            while byte not in used:
                byte += 1
            begin += -begin % step
            if byte - begin >= size:
                holes.append((byte - begin, begin))
        lowest = min((begin for _, begin in holes), default=high + -high % step)
        placed[row] = min(holes)[1] if best and holes else lowest
    return [placed[row] for row in range(len(blocks))]


@pytest.mark.parametrize("best", [False, True])
def test_first_and_best_fit_take_the_lowest_and_the_smallest_hole(best: bool) -> None:
    for seed in SEEDS:
        blocks = blocks_of(any_problem(seed, most=16))
        draw = random.Random(seed)
        order = sorted(range(len(blocks)), key=lambda _: draw.random())
        expected = naive_place(blocks, order, best=best)
        assert place_in_order(blocks, order, best=best) == expected
        assert place_in_order(blocks, order, best=best, many_pairs=-1) == expected
        by_start = sorted(range(len(blocks)), key=lambda row: (blocks.starts[row], row))
        assert program_order(blocks) == by_start
        expected = naive_place(blocks, by_start, best=best)
        assert (best_fit if best else first_fit)(blocks) == expected
        if blocks.plain:
            assert place_online(blocks, best=best) == expected


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run what would be compiled as it is, on the same int64 arrays; return the names of what was asked for."""
    asked: list[str] = []

    def compile_not(source: Callable[..., Any]) -> Callable[..., Any]:
        asked.append(source.__name__)
        return source

    monkeypatch.setattr(compiled, "available", lambda: True)
    monkeypatch.setattr(compiled, "compiled", compile_not)
    return asked


def test_neighbours_are_looked_up_where_lists_would_be_long() -> None:
    for seed in SEEDS:
        for best in (False, True):
            blocks = blocks_of(any_problem(seed))
            order = sorted(range(len(blocks)), key=lambda row: (row * 7) % 5)
            expected, pairs = naive_place(blocks, order, best=best), blocks.num_pairs
            ticks: list[None] = []
            found = place_in_order(
                blocks, order, best=best, tick=lambda ticks=ticks: ticks.append(None), many_pairs=pairs - 1
            )
            assert found == expected and len(ticks) == len(order) and "conflicts" not in vars(blocks)
            assert place_in_order(blocks, order, best=best, many_pairs=pairs) == expected
            assert "conflicts" in vars(blocks)


def test_greedy_takes_the_most_important_first() -> None:
    for seed in SEEDS:
        blocks = blocks_of(any_problem(seed, most=16))
        lived, sizes = times(blocks), blocks.sizes
        degree = [sum(bool(own & other) for other in lived) for own in lived]
        rows = range(len(blocks))
        by_size = [(-sizes[row], -len(lived[row]), blocks.starts[row], row) for row in rows]
        by_area = [(-sizes[row] * len(lived[row]), -sizes[row], row) for row in rows]
        by_degree = [(-degree[row], -sizes[row], row) for row in rows]
        for solver, keys in (
            (greedy_by_size, by_size),
            (greedy_by_area, by_area),
            (greedy_by_conflicts, by_degree),
        ):
            assert solver(blocks) == naive_place(blocks, [key[-1] for key in sorted(keys)], best=False)


def keys_of(blocks: Blocks) -> dict[str, list[int]]:
    """Return what preorders compare: the largest load a block takes part in, its sections, its size times those."""
    lived, sizes = times(blocks), blocks.sizes
    load = {t: sum(size for size, own in zip(sizes, lived, strict=True) if t in own) for t in range(-5, 30)}
    cuts = sections_of(lived)
    widths = [sum(time in own for time in cuts) for own in lived]
    areas = [size * width for size, width in zip(sizes, widths, strict=True)]
    return {"T": [max(load[time] for time in own) for own in lived], "W": widths, "A": areas}


def test_skyline_takes_what_can_lie_lowest() -> None:
    for seed in SEEDS:
        blocks = blocks_of(any_problem(seed, most=16))
        lived, columns, n = times(blocks), keys_of(blocks), len(blocks)
        for keys in (*PREORDERS, "T", "W", "A"):
            ranked = sorted(range(n), key=lambda row: [*(-columns[key][row] for key in keys), row])
            assert preorder(blocks, keys) == ranked
            placed = {row: pin for row, pin in enumerate(blocks.pins or ()) if pin is not None}
            tops = dict.fromkeys(range(-5, 30), 0)
            free = [row for row in ranked if row not in placed]
            while free:
                lows = [lifted(blocks, row, max(tops[time] for time in lived[row])) for row in free]
                row = free.pop(lows.index(min(lows)))
                placed[row] = min(lows)
                tops |= dict.fromkeys(lived[row], placed[row] + blocks.sizes[row])
            assert skyline(blocks, keys) == [placed[row] for row in range(n)]


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 512, 1_000])
def test_long_passes_look_at_the_clock_every_so_many_blocks(count: int) -> None:
    ticks: list[int] = []
    seen: list[int] = []
    for item in paced(range(count), lambda: ticks.append(len(seen)), every=256):
        seen.append(item)
    assert seen == list(range(count)) and ticks == list(range(255, count, 256))


@pytest.mark.parametrize("aligned", [False, True])
def test_every_solver_looks_at_the_clock_every_so_many_blocks(aligned: bool) -> None:
    """Online placing takes next to no time for a block; the others look twice as often."""
    online = {first_fit, best_fit} if not aligned else set()
    for count in (255, 256, 510, 512, 1_022, 1_024):
        steps = [1 + row % 2 for row in range(count)] if aligned else 1
        problem = Problem(sizes=[3] * count, starts=range(count), ends=range(2, count + 2), alignments=steps)
        blocks = blocks_of(problem)
        assert blocks.plain == (not aligned)
        for solver in (first_fit, best_fit, greedy_by_size, greedy_by_area, greedy_by_conflicts):
            ticks: list[None] = []
            solver(blocks, lambda ticks=ticks: ticks.append(None))
            assert len(ticks) == count // (512 if solver in online else 256)
        ticks = []
        skyline(blocks, tick=lambda ticks=ticks: ticks.append(None))
        assert count // 256 <= len(ticks) <= 1 + count // 64  # some are looked up again


def test_neighbours_are_those_that_share_time() -> None:
    draw = random.Random(9)
    for count in (1, 2, 63, 64, 65, 128, 129, 300):
        starts = [draw.randrange(count) for _ in range(count)]
        ends = [start + draw.randrange(1, 2 + count // 3) for start in starts]
        near = Neighbours(starts, ends)
        assert near.rows.tolist() == sorted(range(count), key=lambda row: (starts[row], row))
        assert near.starts.tolist() == sorted(starts) and near.ends.tolist() == [ends[row] for row in near.rows]
        for place, row in enumerate(near.rows):
            found = [int(near.rows[other]) for other in near.of(place)]
            assert len(found) == len(set(found))
            assert set(found) == {o for o in range(count) if starts[o] < ends[row] and starts[row] < ends[o]}
    assert Neighbours([], []).rows.tolist() == []


def test_neighbours_keep_no_list_of_what_is_over() -> None:
    n = 1 << 14
    tracemalloc.start()
    near = Neighbours(range(n), range(2, n + 2))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert near.of(n - 1).tolist() == [n - 2, n - 1] and held < 64 * n


def joined(layout: Layout, name: str, cuts: str, at: int) -> list[int]:
    return layout.columns[name][layout.columns[cuts][at] : layout.columns[cuts][at + 1]]


def test_a_layout_lists_what_its_names_say() -> None:
    for seed in SEEDS:
        blocks = blocks_of(any_problem(seed))
        if not len(blocks):
            continue
        layout = layout_of(blocks)
        pins = blocks.pins if blocks.pins is not None else [None] * len(blocks)
        lived, cuts, columns = times(blocks), sections_of(times(blocks)), layout.columns
        assert layout.rows == [row for row in preorder(blocks, PREORDERS[0]) if pins[row] is None]
        assert layout.num_sections == len(cuts) == len(columns["totals"]) == len(columns["crossing"])
        rows = layout.rows
        inside = [[i for i, row in enumerate(rows) if time in lived[row]] for time in cuts]
        own = [[s for s, time in enumerate(cuts) if time in lived[row]] for row in rows]
        assert columns["sizes"] == [blocks.sizes[row] for row in rows]
        assert columns["alignments"] == [blocks.alignments[row] if blocks.alignments is not None else 1 for row in rows]
        assert columns["low"] == [sections[0] for sections in own]
        assert columns["high"] == [sections[-1] + 1 for sections in own]
        assert columns["totals"] == [sum(columns["sizes"][i] for i in members) for members in inside]
        assert columns["crossing"] == [sum(s[0] <= at < s[-1] for s in own) for at in range(len(cuts))]
        assert len(set(columns["salts"])) == len(rows) and all(0 <= salt < 1 << 62 for salt in columns["salts"])
        spans = [blocks.sections.spans[row] for row in rows]
        for i, row in enumerate(rows):
            pieces = zip(*(joined(layout, f"piece_{end}", "piece_cuts", i) for end in ("low", "high")), strict=True)
            assert list(pieces) == list(blocks.sections.spans[row])
            assert joined(layout, "near", "near_cuts", i) == [
                j for j, other in enumerate(rows) if j != i and lived[other] & lived[row]
            ]
            around = [o for o, pin in enumerate(pins) if pin is not None and lived[o] & lived[row]]
            boxes = sorted((pins[o] or 0, (pins[o] or 0) + blocks.sizes[o]) for o in around)
            lows, tops = (joined(layout, name, "pin_cuts", i) for name in ("pin_low", "pin_top"))
            assert list(zip(lows, tops, strict=True)) == boxes
            alike = [(columns["sizes"][j], columns["alignments"][j], span) for j, span in enumerate(spans)]
            same = [j for j in range(len(rows)) if alike[j] == alike[i]]
            assert columns["twins"][i] == min((j for j in same if j > i), default=-1)
            floor = 0
            for _ in range(same.index(i) + 1):  # twins lie one on top of the other
                start = lifted(blocks, row, floor)
                floor = start + blocks.sizes[row]
            assert columns["starts"][i] == start
        for section, members in enumerate(inside):
            before = inside[section - 1] if section else []
            assert joined(layout, "members", "member_cuts", section) == members
            assert joined(layout, "opening", "opening_cuts", section) == [i for i in members if i not in before]
            assert joined(layout, "closing", "closing_cuts", section) == [i for i in before if i not in members]
            assert joined(layout, "staying", "staying_cuts", section) == [i for i in members if i in before]
        assert {key: [column[row] for row in rows] for key, column in keys_of(blocks).items()} == layout.keys or (
            blocks.pins is not None  # loads without the pinned blocks
        )
        unpinned = [max(columns["totals"][s] for s in sections) for sections in own]
        widths = [len(sections) for sections in own]
        assert layout.keys == {
            "T": unpinned,
            "W": widths,
            "A": [a * b for a, b in zip(columns["sizes"], widths, strict=True)],
        }
        parts, at = [], 0
        while at < len(cuts):
            end = at + 1
            while any(sections[0] < end <= sections[-1] for sections in own):
                end += 1
            listed = [i for i, sections in enumerate(own) if at <= sections[0] < end]
            if listed:
                parts.append((at, end, listed))
            at = end
        assert layout.parts == parts
        assert layout.array.tolist() == layout.records


class Climb:
    """Late acceptance over the order of drops, step by step on lists of rows."""

    def __init__(self, layout: Layout, order: list[int], seed: int) -> None:
        self.columns, self.sections, self.order = layout.columns, layout.num_sections, order
        self.draws = (seed * 0x9E3779B97F4A7C1 + 88172645463325252) % (1 << 62) or 1
        self.offsets = [0] * len(order)
        self.cost = self.least = self.drop(order, None) or 0
        self.best, self.peak = list(order), self.highest()
        self.past = [self.cost] * 1000
        self.steps = 0

    def highest(self) -> int:
        return max(map(int.__add__, self.offsets, self.columns["sizes"]))

    def drop(self, order: list[int], limit: int | None) -> int | None:
        """Drop rows on the skyline; return peak x sections + tops, or None once a top lies above the limit."""
        tops, columns = [0] * self.sections, self.columns
        fixed = [columns[name] for name in ("pin_cuts", "pin_low", "pin_top")]
        for row in order:
            ranges = range(columns["piece_cuts"][row], columns["piece_cuts"][row + 1])
            under = [s for p in ranges for s in range(columns["piece_low"][p], columns["piece_high"][p])]
            low, size = max(tops[s] for s in under), columns["sizes"][row]
            self.offsets[row] = kernels.lifted(row, low, size, columns["alignments"][row], *fixed)
            if limit is not None and self.offsets[row] + size > limit:
                return None
            for s in under:
                tops[s] = self.offsets[row] + size
        return max(tops) * self.sections + sum(tops)

    def step(self) -> None:
        """Move one row of the order, most often one that lies high, most often to an earlier place."""
        self.steps += 1
        n, mask = len(self.order), (1 << 63) - 1
        self.draws ^= (self.draws << 13) & mask
        self.draws ^= self.draws >> 7
        self.draws ^= (self.draws << 17) & mask
        source, target = (self.draws >> 8) % n, (self.draws >> 32) % n
        top = [self.offsets[row] + self.columns["sizes"][row] for row in self.order]
        if self.draws % 4:
            for k in range(6):
                other = ((self.draws >> 8) + 7919 * k) % n
                source = other if top[other] > top[source] else source
        if self.draws & 4 and target > source:
            target = (self.draws >> 32) % (source + 1)
        moved = list(self.order)
        moved.insert(target, moved.pop(source))
        bound = max(self.cost, self.past[self.steps % 1000])
        cost = self.drop(moved, bound // self.sections)
        if cost is not None and cost <= bound:
            self.order, self.cost = moved, cost
            if cost < self.least:
                self.least, self.best, self.peak = cost, moved, self.highest()
        self.past[self.steps % 1000] = self.cost


def test_local_search_climbs_as_late_acceptance_does() -> None:
    for seed in range(30):
        blocks = blocks_of(any_problem(seed, most=24))
        layout = layout_of(blocks)
        free = layout.rows
        if not free:
            continue
        begin = first_fit(blocks)
        search = LocalSearch(blocks, layout, begin, seed=seed, fast=False)
        climb = Climb(layout, sorted(range(len(free)), key=lambda i: begin[free[i]]), seed)
        goal = 0 if seed % 3 else max(blocks.lower_bound, climb.peak - 3)
        for steps in (0, 1, 40, 1_100 if seed > 20 else 200):
            found = search.advance(steps, goal)
            for _ in range(steps):
                if climb.peak <= goal:
                    break
                climb.step()
            assert found == climb.peak
            kept = list(climb.offsets)
            climb.drop(climb.best, None)
            expected = [pin or 0 for pin in blocks.pins] if blocks.pins is not None else [0] * len(blocks)
            for row, offset in zip(free, climb.offsets, strict=True):
                expected[row] = offset
            climb.offsets = kept
            assert search.offsets() == expected


@pytest.mark.parametrize("seed", range(3))
def test_local_search_remembers_the_costs_of_a_thousand_steps(seed: int) -> None:
    blocks = blocks_of(perfect(16, seed, height=40))
    layout, begin = layout_of(blocks), list(accumulate([0, *blocks.sizes[:-1]]))
    search = LocalSearch(blocks, layout, begin, seed=seed, fast=False)
    climb = Climb(layout, sorted(range(len(blocks)), key=lambda i: begin[layout.rows[i]]), seed)
    for _ in range(2_400):
        climb.step()
    assert search.advance(2_400, 0) == climb.peak
    climb.drop(climb.best, None)
    assert [search.offsets()[row] for row in layout.rows] == climb.offsets


def test_local_search_climbs_on_arrays_as_on_lists(uncompiled: list[str]) -> None:
    for seed in range(6):
        blocks = blocks_of(any_problem(seed, most=24))
        layout, begin = layout_of(blocks), first_fit(blocks)
        slow, fast = (LocalSearch(blocks, layout, begin, seed=seed, fast=fast) for fast in (False, True))
        assert fast.advance(150, 0) == slow.advance(150, 0) and fast.offsets() == slow.offsets()
        assert all(type(offset) is int for offset in fast.offsets())
    assert {"drop", "improve"} == set(uncompiled)


def test_a_drop_gives_up_once_a_top_is_above_the_limit() -> None:
    for seed in SEEDS[:60]:
        blocks, draw = blocks_of(any_problem(seed)), random.Random(seed)
        layout = layout_of(blocks)
        order = sorted(range(len(layout.rows)), key=lambda _: draw.random())
        if not order:
            continue
        climb = Climb(layout, order, seed)
        names = ("sizes", "piece_cuts", "piece_low", "piece_high", "alignments", "pin_cuts", "pin_low", "pin_top")
        fixed = [layout.columns[name] for name in names]
        for limit in range(climb.highest() - 3, climb.highest() + 2):
            offsets, tops = [99] * len(order), [99] * layout.num_sections
            cost = climb.drop(order, limit)
            assert kernels.drop(order, offsets, tops, *fixed, limit=limit) == (-1 if cost is None else cost)
            assert cost is None or offsets == climb.offsets


def test_what_is_moved_lies_at_its_target_and_the_others_keep_their_order() -> None:
    for source, target in product(range(6), repeat=2):
        order = list("abcdef")
        kernels.move(order, source, target)
        others = list("abcdef")
        others.insert(target, others.pop(source))
        assert order == others


def test_a_search_of_nothing_but_pins_has_a_peak_of_nothing() -> None:
    blocks = blocks_of(Problem(sizes=[3], starts=[0], ends=[1], pins=[4]))
    search = LocalSearch(blocks, layout_of(blocks), [4], seed=0, fast=False)
    assert search.advance(10, 0) == 0 and search.offsets() == [4]
