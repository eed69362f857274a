"""Ejection search, put back and thrown out block by block as it is defined, and the targets that it is given."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable

import pytest
from offset_instances import perfect
from test_offset_portfolio import BOUND, PEAK, Clock, placed, problem_of

from mosaic.planner.offsets import Blocks, Problem, blocks_of, ejection
from mosaic.planner.offsets.blocks import Tick
from mosaic.planner.offsets.ejection import Ejection, squeeze
from mosaic.planner.offsets.incumbent import Incumbent
from mosaic.planner.offsets.online import first_fit


class Definition:
    """Placed blocks, ejected blocks, and each block's weight; every offset is tried."""

    def __init__(self, blocks: Blocks, offsets: list[int]) -> None:
        self.blocks, self.out, self.target = blocks, list[int](), 0
        self.order = sorted(range(len(blocks)), key=lambda row: (blocks.starts[row], row))
        self.low = dict(enumerate(offsets))
        self.area = [size * length for size, length in zip(blocks.sizes, blocks.lengths, strict=True)]
        mean = sum(self.area) / len(self.area)
        self.weight = [1 + int(area * (1_000 / mean)) for area in self.area]
        room = blocks.lower_bound // 500
        small = max(size for size in range(max(blocks.sizes) + 1) if self.load(size) <= room)
        self.throw([row for row in self.order if blocks.sizes[row] <= small])

    def load(self, largest: int) -> int:
        """Return the largest load of the blocks up to a size."""
        rows = [row for row in self.order if self.blocks.sizes[row] <= largest]
        return max(
            (sum(self.blocks.sizes[o] for o in rows if self.lives(o, self.blocks.starts[row])) for row in rows),
            default=0,
        )

    def lives(self, row: int, at: int) -> bool:
        return self.blocks.starts[row] <= at < self.blocks.ends[row]

    def throw(self, rows: list[int]) -> None:
        for row in sorted(rows, key=lambda row: (self.area[row], self.order.index(row))):
            del self.low[row]
            self.out.append(row)

    def aim(self, target: int) -> None:
        self.target = target
        self.throw([row for row in self.order if row in self.low and self.low[row] + self.blocks.sizes[row] > target])

    def hit(self, row: int, offset: int) -> list[int]:
        """Return what is in a block's way at an offset, by start."""
        end, sizes = offset + self.blocks.sizes[row], self.blocks.sizes
        near = [o for o in self.order if o in self.low and self.blocks.meet(row, o)]
        return [o for o in near if offset < self.low[o] + sizes[o] and self.low[o] < end]

    def cheapest(self, row: int, target: int) -> int:
        step = self.blocks.alignments[row] if self.blocks.alignments is not None else 1
        highest = target - self.blocks.sizes[row]
        offsets: Iterable[int] = range(0, highest + 1, step)
        if highest > 500:  # the lowest of the cheapest is 0, or on top of something
            tops = [0, *(low + self.blocks.sizes[other] for other, low in self.low.items())]
            offsets = [at for top in tops if (at := top + -top % step) <= highest]
        return min(offsets, key=lambda offset: (sum(self.weight[o] for o in self.hit(row, offset)), offset))

    def put_back(self) -> None:
        row = self.out.pop()
        offset = self.cheapest(row, self.target)
        if hit := self.hit(row, offset):
            self.weight[row] += 10_000
            self.throw(hit)
        self.low[row] = offset

    def offsets(self) -> list[int]:
        """Return where all lie once what is out is put above or between, large areas first."""
        low = dict(self.low)
        for row in sorted(self.out, key=lambda row: -self.area[row]):
            self.low[row] = self.cheapest(row, 2 * sum(self.blocks.sizes))
        found = [self.low[row] for row in range(len(self.blocks))]
        self.low = low
        return found


def scattered(draw: random.Random, count: int) -> Problem:
    starts = [draw.randrange(count) for _ in range(count)]
    ends = [start + draw.randrange(1, 3 + count // 3) for start in starts]
    sizes = [draw.choice((1, draw.randrange(1, 9), draw.randrange(30, 60))) for _ in starts]
    alignments = [draw.choice((1, 2, 3, 8)) for _ in starts] if draw.random() < 0.4 else 1
    return Problem(sizes=sizes, starts=starts, ends=ends, alignments=alignments)


@pytest.mark.some
@pytest.mark.parametrize("seed", range(24))
def test_blocks_are_put_back_and_thrown_out_as_defined(seed: int) -> None:
    draw = random.Random(seed)
    problem = perfect(18, seed, height=40) if seed % 6 == 0 else scattered(draw, draw.randrange(2, 22))
    if seed % 3 == 1:  # so large that the smallest are left for last
        sizes = [size if size < 9 else 40 * size for size in problem.sizes]
        problem = Problem(sizes=sizes, starts=problem.starts, ends=problem.ends)
    blocks = blocks_of(problem)
    start = first_fit(blocks)
    search, said = Ejection(blocks, start), Definition(blocks, start)
    assert search.target == 0 and search.offsets() == said.offsets()
    for share in (1.0, 0.9, 1.1):
        target = max(*blocks.sizes, round(blocks.lower_bound * share))
        search.aim(target)
        said.aim(target)
        assert search.target == target
        for steps in (0, 1, 1, 1, 9):
            done = search.advance(steps)
            for _ in range(steps):
                if said.out:
                    said.put_back()
            assert (done, search.num_out) == (not said.out, len(said.out))
            assert search.area_out == sum(said.area[row] for row in said.out)
        assert search.offsets() == said.offsets()


def test_small_blocks_come_last() -> None:
    """Blocks of 2 bytes load at most 20 bytes, a five-hundredth of 10,000; with blocks of 3 bytes it would be more."""
    for largest, out in ((10_000, 11), (9_999, 0)):
        sizes = [largest, 2, 2, 3, *[2] * 9, 4]
        starts = [0, 1, 2, 2, *[2] * 9, 5]
        blocks = blocks_of(Problem(sizes=sizes, starts=starts, ends=[start + 1 for start in starts]))
        search = Ejection(blocks, first_fit(blocks))
        assert (search.num_out, search.area_out) == (out, 2.0 * out)


def test_every_block_put_back_looks_at_the_clock() -> None:
    blocks = blocks_of(scattered(random.Random(1), 20))
    search = Ejection(blocks, first_fit(blocks))
    search.aim(blocks.lower_bound)
    ticks: list[int] = []
    out = search.num_out
    assert out >= 3
    search.offsets(lambda: ticks.append(0))
    assert len(ticks) == out
    search.advance(3, lambda: ticks.append(0))
    assert len(ticks) == out + 3


class Scripted:
    """In place of the search: says what the test has it say, and writes down what it is asked."""

    area: Callable[[int], float] = staticmethod(lambda step: 100.0)
    met: Callable[[int], bool] = staticmethod(lambda target: False)
    peak: Callable[[int], int] = staticmethod(lambda target: PEAK)
    seconds = 0.0
    clock: Clock | None = None
    made: list[Scripted]

    def __init__(self, blocks: Blocks, offsets: list[int]) -> None:
        assert blocks.peak(offsets) == PEAK
        self.blocks, self.targets, self.steps, self.told = blocks, list[int](), list[int](), 0
        self.made.append(self)

    @property
    def target(self) -> int:
        return self.targets[-1]

    @property
    def area_out(self) -> float:
        return type(self).area(len(self.steps))

    def aim(self, target: int) -> None:
        self.targets.append(target)

    def advance(self, steps: int, tick: Tick) -> bool:
        tick()
        if self.clock is not None:
            self.clock.now += self.seconds
        self.steps.append(steps)
        return type(self).met(self.target)

    def offsets(self, tick: Tick) -> list[int]:
        tick()
        self.told += 1
        return placed(self.blocks, type(self).peak(self.target))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    class Own(Scripted):
        made: list[Scripted] = []  # noqa: RUF012

    monkeypatch.setattr(ejection, "Ejection", Own)
    return Own


def squeezed(steps: int | None, timeout_s: float | None = None) -> Incumbent:
    blocks = blocks_of(problem_of())
    best = Incumbent(blocks, timeout_s)
    best.offer(placed(blocks, PEAK), "first")
    squeeze(blocks, best, steps)
    return best


def test_a_target_that_is_met_is_halved_towards_the_bound(scripted: type[Scripted]) -> None:
    scripted.met = staticmethod(lambda target: True)
    scripted.peak = staticmethod(lambda target: target)
    best = squeezed(None)
    search = scripted.made[0]
    halves = [125, 62, 31, 15, 7, 3, 1, 0]
    assert search.targets[: len(halves)] == [BOUND + half for half in halves]
    assert search.steps == [500] * len(halves) and search.told == len(halves)
    assert best.done and best.solution().solver == "ejection"


def test_a_target_that_is_not_met_for_long_is_raised_and_begun_anew_at_the_peak(scripted: type[Scripted]) -> None:
    """Nothing gets better after the first 500 steps: 20,000 later less is asked for."""
    squeezed(20_500 * 4)
    search = scripted.made[0]
    assert search.targets == [1_125, 1_125 + 875 // 4, 1_343 + 657 // 4, 1_507 + 493 // 4, 1_630 + 370 // 4]
    assert search.steps == [500] * 41 * 4 and search.told == 5
    squeezed(20_500 * 30)
    targets = scripted.made[1].targets
    top = targets.index(PEAK - 1)
    assert targets[top - 2 : top + 2] == [PEAK - 3, PEAK - 2, PEAK - 1, (BOUND + PEAK) // 2]


def test_a_search_that_gets_on_by_a_hundredth_is_let_go_on(scripted: type[Scripted]) -> None:
    scripted.area = staticmethod(lambda step: 100.0 * 0.9899 ** (step // 39))
    squeezed(100_000)
    assert len(scripted.made[0].targets) == 1 and len(scripted.made[0].steps) == 200
    scripted.area = staticmethod(lambda step: 100.0 if step < 20 else 99.0)
    squeezed(21_000)
    assert len(scripted.made[1].targets) == 2
    scripted.area = staticmethod(lambda step: 100.0 if step < 20 else 98.99)
    squeezed(21_000)
    assert len(scripted.made[2].targets) == 1


def test_squeezing_ends_out_of_steps_or_with_a_share_of_the_time_left(
    scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.peak = staticmethod(lambda target: PEAK - 1)
    for steps, turns in ((0, 0), (1, 1), (500, 1), (501, 2), (1_200, 3)):
        best = squeezed(steps)
        assert len(scripted.made[-1].steps) == turns and scripted.made[-1].told == 1
        assert best.peak == PEAK - 1
    scripted.clock, scripted.seconds = Clock(), 1.0
    monkeypatch.setattr(time, "perf_counter", scripted.clock)
    squeezed(None, timeout_s=108.0)
    assert len(scripted.made[-1].steps) == 101  # 7 s are kept for placing what is out
