"""The exact search takes the very steps that its definition asks for: said again here by recursion, without a trail.

The definition keeps nothing but the lowest place of each row: what a section holds, how far up it is filled and which
rows may come next is worked out again each time it is asked for. Steps are counted in placements.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from offset_instances import perfect
from test_offset_definitions import any_problem, lifted, times

from mosaic.planner.offsets import Problem, blocks_of, branching, compiled, memory
from mosaic.planner.offsets.blocks import Blocks
from mosaic.planner.offsets.exact import FAILED, LANES, RUNNING, SOLVED, Layout, Search, layout_of, luby
from mosaic.planner.offsets.memory import memory_of
from mosaic.planner.offsets.propagation import subset_sums

RULES = ("choices", "floor", "offset")
PLANS = [(rule, keys) for keys in ("TWA", "TAW", "ATW") for rule in RULES]

Low = tuple[int, ...]  # the lowest place of each row; where it lies, once it is placed


class TurnOver(Exception):
    """The placements of a turn are used up."""


@dataclass(frozen=True)
class State:
    low: Low
    unplaced: frozenset[int]


@dataclass
class Definition:
    """A search for a placement of a layout's rows within a capacity."""

    blocks: Blocks
    layout: Layout
    capacity: int
    nodes: int = 0
    limit: int = 0
    rule: str = ""
    ranks: Sequence[int] = ()
    weights: Sequence[int] = ()
    refuted: set[frozenset[tuple[int, int]]] = field(default_factory=set)

    def __post_init__(self) -> None:
        columns, rows, lived = self.layout.columns, self.layout.rows, times(self.blocks)
        self.size, self.twin = columns["sizes"], columns["twins"]
        self.near = [{j for j, b in enumerate(rows) if j != i and lived[b] & lived[a]} for i, a in enumerate(rows)]
        spans = [self.blocks.sections.spans[row] for row in rows]
        self.sections = [{s for a, b in span for s in range(a, b)} for span in spans]
        self.inside = [[i for i in range(len(rows)) if s in self.sections[i]] for s in range(self.layout.num_sections)]
        self.start = State(tuple(columns["starts"]), frozenset(range(len(rows))))

    def free(self, row: int, offset: int) -> int:
        return lifted(self.blocks, self.layout.rows[row], offset)

    def lift(self, state: State, row: int, least: int) -> State:
        """Raise a row, and its twins on top of it."""
        low = list(state.low)
        while row >= 0 and row in state.unplaced and low[row] < (offset := self.free(row, least)):
            low[row], least = offset, offset + self.size[row]
            row = self.twin[row]
        return replace(state, low=tuple(low))

    def members(self, state: State, section: int) -> list[int]:
        return [row for row in self.inside[section] if row in state.unplaced]

    def total(self, state: State, section: int) -> int:
        return sum(self.size[row] for row in self.members(state, section))

    def floor(self, state: State, section: int) -> int:
        return min((state.low[row] for row in self.members(state, section)), default=1 << 62)

    def reach(self, state: State, section: int) -> int:
        """Return what a section's unplaced rows reach, each at its lowest or on top of those that begin below it."""
        reach = 0
        for row in sorted(self.members(state, section), key=lambda row: state.low[row]):
            reach = max(reach, state.low[row]) + self.size[row]
        return reach

    def settled(self, state: State) -> State | None:
        """Return what follows; None if something cannot fit."""
        while True:
            before = state
            if any(self.reach(state, section) > self.capacity for section in range(len(self.inside))):
                return None
            for section in range(1, len(self.inside)):
                least = self.meeting(state, section)
                if least is None:
                    return None
                for row in self.staying(state, section):
                    state = self.lift(state, row, max(least, state.low[row]))
            if state == before:
                return state

    def staying(self, state: State, section: int) -> list[int]:
        return [row for row in self.members(state, section) if section - 1 in self.sections[row]]

    def meeting(self, state: State, section: int) -> int | None:
        """Return the least offset at which a row that stays over a section's beginning can lie; None if nowhere.

        Under it lie rows of the one section and rows of the other, and neither wastes more than it has to spare.
        """
        staying = self.staying(state, section)
        if not staying:
            return 0
        reachable = []
        for at in (section - 1, section):
            floor, total = self.floor(state, at), self.total(state, at)
            others = [self.size[row] for row in self.members(state, at) if row not in staying]
            picks = itertools.product((0, 1), repeat=len(others))
            sums = {floor + sum(itertools.compress(others, pick)) for pick in picks}
            spare = self.capacity - floor - total
            reachable.append({at for first in sums for at in range(first, first + spare + 1)})
        least = min(state.low[row] for row in staying)
        return min((at for at in set.intersection(*reachable) if at >= least), default=None)

    def place(self, state: State, row: int) -> State | None:
        top = state.low[row] + self.size[row]
        state = State(state.low, state.unplaced - {row})
        for other in sorted(self.near[row] & state.unplaced):
            state = self.lift(state, other, max(top, state.low[other]))
        return self.settled(state)

    def refuse(self, state: State, row: int) -> State | None:
        """Return the state in which a row lies above one of its neighbours."""
        top = state.low[row] + self.size[row]
        below = [o for o in self.near[row] & state.unplaced if state.low[o] < top]
        if not below:
            return None
        return self.settled(self.lift(state, row, min(state.low[o] + self.size[o] for o in below)))

    def choose(self, state: State, rows: Sequence[int]) -> int:
        if self.rule == "offset":
            return min(rows, key=lambda row: (state.low[row], self.ranks[row]))
        found = []
        for section in sorted({s for row in rows for s in self.sections[row]}):
            members, floor = self.members(state, section), self.floor(state, section)
            lowest = [row for row in members if state.low[row] == floor and self.grounded(state, row)]
            last = self.capacity - self.total(state, section)
            choices = sum(state.low[row] <= last for row in members)
            score = self.weights[section] * (choices if self.rule == "choices" else floor)
            if lowest:
                row = min(lowest, key=lambda row: self.ranks[row])
                found.append((score, self.capacity - self.reach(state, section), section, row))
        return min(found)[-1]

    def grounded(self, state: State, row: int) -> bool:
        return all(
            state.low[other] + self.size[other] > state.low[row]
            for section in self.sections[row]
            for other in self.members(state, section)
        )

    def parts(self, state: State, rows: Sequence[int]) -> list[list[int]]:
        """Return the unplaced rows by the stretches of time that none of them leaves, the tightest first."""
        left = [row for row in rows if row in state.unplaced]
        spans = sorted((min(self.sections[row]), max(self.sections[row])) for row in left)
        ends: list[tuple[int, int]] = []
        for first, last in spans:
            if ends and first <= ends[-1][1]:
                ends[-1] = (ends[-1][0], max(last, ends[-1][1]))
            else:
                ends.append((first, last))
        ends.sort(key=lambda end: (min(self.capacity - self.reach(state, s) for s in range(end[0], end[1] + 1)), end))
        return [[row for row in left if first <= min(self.sections[row]) <= last] for first, last in ends]

    def solve(self, state: State, rows: Sequence[int]) -> State | None:
        if len(rows) == 1:
            self.nodes += 1
            return self.place(state, rows[0])
        key = frozenset((row, state.low[row]) for row in rows)
        if key in self.refuted:
            return None
        now: State | None = state
        while now is not None:
            if self.nodes >= self.limit:
                raise TurnOver
            row = self.choose(now, rows)
            self.nodes += 1
            after = self.place(now, row)
            if after is not None:
                for part in self.parts(after, rows):
                    after = self.solve(after, part)
                    if after is None:
                        break
                else:
                    return after
            now = self.refuse(now, row)
        self.refuted.add(key)
        return None

    def run(self, lane: int, turn: int, most: int) -> tuple[int, list[int] | None]:
        """Search in turns; return the status, and the offsets of the rows if they are found."""
        draw = random.Random(lane)
        begin = self.settled(self.start)
        for number in itertools.count():
            round_, at = divmod(LANES * number + lane, len(PLANS))
            self.rule, keys = PLANS[at]
            noise = 0.3 if round_ else 0.0
            scale = [draw.uniform(1 - noise, 1 + noise) for _ in self.size]
            column = [[-self.layout.keys[key][row] * scale[row] for key in keys] for row in range(len(self.size))]
            ranked = sorted(range(len(self.size)), key=lambda row: column[row])
            self.ranks = [ranked.index(row) for row in range(len(self.size))]
            self.weights = [round(1000 * draw.uniform(1 - noise, 1 + noise)) for _ in self.inside]
            self.limit = min(self.nodes + turn * luby(round_ + 1), most)
            state = begin
            if state is None:
                return FAILED, None
            try:
                for _, _, rows in self.layout.parts:
                    state = self.solve(state, rows)
                    if state is None:
                        return FAILED, None
            except TurnOver:
                if self.nodes >= most:
                    return RUNNING, None
                continue
            return SOLVED, list(state.low)
        raise AssertionError


def compare(problem: Problem, capacity: int, lane: int, turn: int, most: int = 400) -> int:
    blocks = blocks_of(problem)
    layout = layout_of(blocks)
    said = Definition(blocks, layout, capacity)
    status, low = said.run(lane, turn, most)
    search = Search(layout, capacity, fast=False, lane=lane, turn=turn)
    assert (search.advance(most), search.nodes) == (status, said.nodes)
    if low is not None:
        offsets = search.offsets(blocks)
        assert [offsets[row] for row in layout.rows] == low
        assert all(pin in (None, at) for pin, at in zip(blocks.pins or [None] * len(blocks), offsets, strict=True))
    return search.nodes


def test_searches_take_the_steps_of_the_definition() -> None:
    for seed in range(60):
        problem = any_problem(seed, most=11)
        blocks = blocks_of(problem)
        if not layout_of(blocks).rows:
            continue
        for capacity in (blocks.lower_bound - 1, blocks.lower_bound, blocks.lower_bound + 2):
            for lane in (seed % 9, (seed + 4) % 9):
                compare(problem, capacity, lane, 4)


def test_a_memory_has_room_for_the_longest_search_and_no_more() -> None:
    for seed in range(40):
        layout = layout_of(blocks_of(any_problem(seed)))
        slow, fast = (
            memory_of(records, layout.parts, 77, records is layout.array) for records in (layout.records, layout.array)
        )
        n, sections = len(layout.rows), layout.num_sections
        for m, slots in ((slow, 1 << 14), (fast, 1 << 18)):
            starts = [m[at] for at in (memory.DIRTY_QUEUE, memory.DOUBTFUL_QUEUE, memory.FIRST_FRAME)]
            lists = starts[-1] + (n + 1) * memory.FRAME_WIDTH
            parts = lists + sum(range(n + 1))  # with rows all alive at once: all, all but one, and so on
            starts += [lists, parts, m[memory.SUMS], m[memory.REFUTED], m[memory.TRAIL], len(m)]
            assert starts[:3] == [len(layout.records) + at for at in (0, sections, 2 * sections)]
            assert [b - a for a, b in itertools.pairwise(starts[4:])] == [
                n * memory.PART_WIDTH, 3 * memory.MOST_SUMS, slots, 2 * m[memory.ROOM],
            ]  # fmt: skip
            assert m[memory.REFUTED_MASK] == slots - 1 and m[memory.CAPACITY] == 77
            assert (
                m[memory.LISTED_TOP] == lists + n
                and m[memory.PARTS_TOP] == parts + len(layout.parts) * memory.PART_WIDTH
            )
        moved = (1 << 18) - (1 << 14)
        assert isinstance(slow, list) and fast.dtype == np.int64 and len(fast) == len(slow) + moved
        differ = {at for at, value in enumerate(slow) if fast[at] != value}
        assert differ <= {memory.TRAIL, memory.REFUTED_MASK} and fast[memory.TRAIL] == slow[memory.TRAIL] + moved


@pytest.mark.parametrize("seed", range(60))
def test_sums_of_subsets_are_listed_once_up_to_the_capacity(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.randrange(1, 30) for _ in range(draw.randrange(1, 9))]
    base, capacity, skipped = draw.randrange(9), draw.randrange(90), draw.choice((0.0, 0.2))
    if seed < 4:  # of the sums up to the capacity 1,024 are kept, more are not
        sizes, capacity, skipped = [1 << power for power in range(10 + seed % 2)], 1_023 + seed // 2, 0.0
    layout = layout_of(blocks_of(Problem(sizes=sizes, starts=[0] * len(sizes), ends=[1] * len(sizes))))
    m = memory_of(layout.records, layout.parts, capacity + base, False)
    first, end = m[m[memory.FIRST_SECTION] + memory.MEMBERS :][:2]
    for row in m[first:end]:
        m[row + memory.PLACED] = int(draw.random() < skipped)
    left = [m[row + memory.SIZE] for row in m[first:end] if not m[row + memory.PLACED]]
    sums = {base + sum(itertools.compress(left, pick)) for pick in itertools.product((0, 1), repeat=len(left))}
    expected = sorted(value for value in sums if value <= capacity + base)
    count = subset_sums(base, first, end, m[memory.SUMS], m)
    assert count == (len(expected) if len(expected) <= 1_024 else 0)
    assert m[m[memory.SUMS] :][:count] == expected[:count]


def test_fingerprints_use_all_bits_and_spread_over_the_slots() -> None:
    """Offsets are multiples of large powers of two, where sizes are aligned."""
    layout = layout_of(blocks_of(Problem(sizes=[1 << 20] * 4, starts=[0] * 4, ends=[1] * 4)))
    m = memory_of(layout.records, layout.parts, 1 << 30, False)
    frame, part, draw = m[memory.FRAME], m[m[memory.FRAME] + memory.F_PART], random.Random(1)
    m[frame + memory.F_LIST], m[frame + memory.F_LIST_END] = m[part + memory.P_LIST], m[part + memory.P_LIST_END]
    keys = {}
    for _ in range(400):
        state = tuple(draw.randrange(64) << 20 for _ in range(4))
        m[memory.NUM_REGISTERS + memory.OFFSET : m[memory.FIRST_SECTION] : memory.ROW_WIDTH] = state
        keys[state] = branching.fingerprint(frame, m)
    found = list(keys.values())
    assert len(set(found)) == len(keys) and len({key & m[memory.REFUTED_MASK] for key in found}) > 0.95 * len(keys)
    assert functools.reduce(int.__or__, found) == (1 << 63) - 1 and functools.reduce(int.__and__, found) == 0


@pytest.mark.filterwarnings("ignore:overflow")  # compiled code wraps without a word
def test_searches_take_the_same_steps_on_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "compiled", lambda source: source)
    for seed in range(6):
        blocks = blocks_of(perfect(9, seed, height=12) if seed % 2 else any_problem(seed, most=11))
        searches = [Search(layout_of(blocks), blocks.lower_bound, fast=fast, turn=5) for fast in (False, True)]
        assert len({(search.advance(60), search.nodes) for search in searches}) == 1
        if searches[0].status == SOLVED:
            one, two = (search.offsets(blocks) for search in searches)
            assert one == two and all(type(offset) is int for offset in two)


@pytest.mark.some
@pytest.mark.parametrize("seed", range(12))
def test_searches_with_no_byte_to_spare_take_the_steps_of_the_definition(seed: int) -> None:
    problem = perfect(11 + seed % 5, seed, height=12 + seed)
    for lane in range(3):
        compare(problem, problem.capacity or 0, lane, (20, 3)[seed % 2], 90)
        compare(problem, (problem.capacity or 0) - 1 + 2 * (seed % 2), lane, (20, 3)[seed % 2], 90)
