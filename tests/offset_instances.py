"""Instances of the offset-assignment problem from a seed: perfect cuts, shaken copies, layered networks.

Nothing was tuned on them by hand: parameters of every family are drawn from the seed, and solvers are judged on seeds
that were not used when they were written.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from mosaic.planner.offsets import Problem

Row = tuple[int, int, int]  # size, start, end


def problem_of(rows: list[Row]) -> Problem:
    """Return the plain problem of (size, start, end) rows, with times renumbered."""
    times = {time: at for at, time in enumerate(sorted({time for _, *span in rows for time in span}))}
    return Problem(
        sizes=[size for size, _, _ in rows],
        starts=[times[start] for _, start, _ in rows],
        ends=[times[end] for _, _, end in rows],
    )


def perfect(count: int, seed: int, *, height: int = 1 << 20) -> Problem:
    """Cut a rectangle of time and address into that many pieces: the optimum is its height, and no byte is to spare.

    Pieces are chosen by area, and cut across time or address, now and then into a pinwheel of five.
    """
    draw = random.Random(seed)
    pieces = [(0, 8 * count, 0, height)]  # start, end, low, top
    while len(pieces) < count:
        areas = [(e - s) * (t - b) / height for s, e, b, t in pieces]
        at = draw.choices(range(len(pieces)), areas)[0]
        start, end, low, top = pieces[at]
        if draw.random() < 0.1 and len(pieces) + 4 <= count and end - start > 5 and top - low > 5:
            pieces[at : at + 1] = _pinwheel(draw, *pieces[at])
        elif draw.random() < 0.5 and end - start > 1:
            cut = _cut(draw, start, end)
            pieces[at : at + 1] = [(start, cut, low, top), (cut, end, low, top)]
        elif top - low > 1:
            cut = _cut(draw, low, top)
            pieces[at : at + 1] = [(start, end, low, cut), (start, end, cut, top)]
    draw.shuffle(pieces)
    problem = problem_of([(top - low, start, end) for start, end, low, top in pieces])
    return replace(problem, capacity=height)


def _cut(draw: random.Random, low: int, high: int) -> int:
    return min(high - 1, max(low + 1, round(low + (high - low) * draw.uniform(0.15, 0.85))))


def _pinwheel(draw: random.Random, start: int, end: int, low: int, top: int) -> list[tuple[int, int, int, int]]:
    one, two = sorted(draw.sample(range(start + 1, end), 2))
    under, over = sorted(draw.sample(range(low + 1, top), 2))
    return [
        (start, two, low, under),
        (two, end, low, over),
        (one, end, over, top),
        (start, one, under, top),
        (one, two, under, over),
    ]


def jittered(problem: Problem, seed: int, *, by: float = 0.05) -> Problem:
    """Shake every size by a share of itself, and every time by a share of the whole span; no capacity is kept."""
    draw = random.Random(seed)
    reach = max(1, round((max(problem.ends) - min(problem.starts)) * by / 4))
    rows = []
    for size, start, end in zip(problem.sizes, problem.starts, problem.ends, strict=True):
        start += draw.randint(-reach, reach)
        end = max(start + 1, end + draw.randint(-reach, reach))
        rows.append((max(1, round(size * draw.uniform(1 - by, 1 + by))), start, end))
    return replace(problem_of(rows), capacity=None)


def layered(count: int, seed: int) -> Problem:
    """Return a network of about that many buffers: bodies of operators, with skips, trained or only run."""
    draw = random.Random(seed)
    family = draw.choice((_transformer, _convnet, _branches))
    trained = draw.random() < 0.7
    body = family(draw)
    per_layer = sum(map(len, body)) * (2.6 if trained else 1.0) / len(body)
    layers = max(2, round(count / per_layer))
    tape = _Tape(draw, trained)
    stages = draw.choice((1, 1, 3, 4, 5))
    for layer in range(layers):
        stage = layer * stages // layers
        tape.forward(body[layer % len(body)], shrink=stage if family is _convnet else 0)
    return problem_of(tape.finish()[:count])


Body = list[tuple[int, int, bool]]  # bytes, operators that it lives on for, whether the backward pass needs it


def _unit(draw: random.Random) -> int:
    return draw.choice((1, 2, 3, 5, 6)) * draw.choice((256, 1024, 4096, 65536, 1 << 20))


def _transformer(draw: random.Random) -> list[Body]:
    """One body: norms, projections, scores, a feed-forward block; or two in turns (dense, experts)."""
    unit = _unit(draw)
    wide, heads, kinds = draw.choice((2, 3, 4)), draw.choice((1, 2, 8)), draw.choice((1, 1, 2))
    bodies: list[Body] = []
    for kind in range(kinds):
        body: Body = [(unit, 2, True), (max(unit // 256, 4), draw.randrange(1, 6), True)]
        body += [(unit // draw.choice((1, 1, heads)) or 4, draw.randrange(2, 5), draw.random() < 0.7) for _ in range(3)]
        body += [(unit * draw.choice((1, 2, 3)) + draw.randrange(unit), 1, draw.random() < 0.5), (unit, 1, True)]
        body += [(unit, 6 + draw.randrange(8), False), (max(unit // 256, 4), 2, True)]
        body += [
            (unit * wide * (kind + 1), draw.randrange(1, 4), draw.random() < 0.8) for _ in range(draw.randrange(1, 4))
        ]
        body += [(unit * wide // draw.randrange(1, 5), 0, False), (unit, 9 + draw.randrange(6), False)]
        body += [(4 * draw.randrange(1, 64), 1, False) for _ in range(draw.randrange(4))]
        bodies.append(body)
    return bodies


def _convnet(draw: random.Random) -> list[Body]:
    """Blocks of convolution, scratch, norm, activation; every fourth or so has a skip to the next."""
    unit = _unit(draw) * 4
    bodies: list[Body] = []
    for _ in range(draw.randrange(2, 7)):
        body: Body = []
        for _ in range(draw.randrange(2, 5)):
            share = draw.choice((1, 1, 2, 4))
            body += [(unit // share, draw.randrange(1, 3), True), (draw.randrange(1, unit), 0, False)]
            body += [(max(4, unit // 2048), draw.choice((1, 2)), True), (unit // share, 1, draw.random() < 0.6)]
        body.append((unit, len(body) + draw.randrange(4), draw.random() < 0.5))
        bodies.append(body)
    return bodies


def _branches(draw: random.Random) -> list[Body]:
    """Parallel branches that are joined, of many sizes; long skips as in a U-net."""
    unit = _unit(draw)
    bodies: list[Body] = []
    for _ in range(draw.randrange(1, 4)):
        body: Body = []
        for branch in range(draw.randrange(2, 6)):
            depth = draw.randrange(1, 4)
            body += [
                (draw.randrange(unit // 8, unit) + 4, draw.randrange(1, 4), draw.random() < 0.5) for _ in range(depth)
            ]
            body.append((draw.randrange(unit // 4, unit) + 4, 3 * (5 - branch), True))
        body.append((unit * 2, draw.choice((4, 10, 60, 300)), draw.random() < 0.5))
        bodies.append(body)
    return bodies


class _Tape:
    """Operators one after another; the backward pass frees in reverse what the forward pass kept."""

    def __init__(self, draw: random.Random, trained: bool) -> None:
        self._draw, self._trained = draw, trained
        self._rows: list[Row] = []
        self._kept: list[list[tuple[int, int]]] = []  # per layer: size, start
        self._now = 0
        self._buckets = draw.choice((1, 4, 16))
        self._fixed = draw.randrange(20)

    def forward(self, body: Body, shrink: int) -> None:
        kept = []
        for size, length, needed in body:
            size = max(4, size >> shrink)
            if self._trained and needed:
                kept.append((size, self._now))
            else:
                self._rows.append((size, self._now, self._now + 1 + length))
            self._now += 1
        self._kept.append(kept)

    def finish(self) -> list[Row]:
        gradients: list[tuple[int, int]] = []
        for number, kept in enumerate(reversed(self._kept)):
            for size, start in reversed(kept):
                now, draw = self._now, self._draw
                self._rows.append((size, start, now + 1))
                self._rows.append((size, now, now + draw.choice((2, 2, 3, 6))))
                if draw.random() < 0.4:
                    self._rows.append((max(4, size * draw.randrange(1, 9) // 8), now, now + 1))
                if draw.random() < 0.3:
                    gradients.append((max(4, size // draw.choice((1, 2, 8, 512))), now))
                self._now += 1
            if number % self._buckets == self._buckets - 1:
                self._rows += [(size, start, self._now + 1) for size, start in gradients]
                gradients = []
        end = self._now + 2
        self._rows += [(size, start, end) for size, start in gradients]
        self._rows += [(4 * self._draw.randrange(1, 1 << 16), 0, end) for _ in range(self._fixed)]
        return self._rows


def unrolled(problem: Problem, copies: int, seed: int) -> Problem:
    """Return a training step of several copies in a row: forward parts one after another, backward parts in reverse.

    The turn is the time of the largest load. Sizes are shaken a little, so that no copy is the twin of another.
    """
    draw = random.Random(seed)
    turn, end = _busiest(problem), max(problem.ends)
    shares = [draw.choice((1, 2, 4)) * draw.uniform(0.9, 1.1) for _ in range(copies)]

    def at(time: int, copy: int) -> int:
        return copy * turn + time if time < turn else copies * turn + (copies - 1 - copy) * (end - turn) + time - turn

    rows = []
    for copy, share in enumerate(shares):
        for size, start, stop in zip(problem.sizes, problem.starts, problem.ends, strict=True):
            first = at(start, copy)
            rows.append((max(1, int(size * share)), first, max(first + 1, at(stop - 1, copy) + 1)))
    return problem_of(rows)


def staggered(problem: Problem, copies: int, seed: int) -> Problem:
    """Return several copies, each begun some way into the one before; sizes and times are shaken a little."""
    draw = random.Random(seed)
    span = max(problem.ends) - min(problem.starts)
    stride, by = span * draw.uniform(0.2, 0.9), draw.choice((0.0, 0.1, 0.5))
    rows = []
    for copy in range(copies):
        at = round(copy * stride)
        for size, start, end in zip(problem.sizes, problem.starts, problem.ends, strict=True):
            end = max(start + 1, end + draw.randint(-3, 3))
            rows.append(
                (max(1, int(size * draw.uniform(1 - by, 1 + by))), 4 * (at + start) + draw.randrange(4), 4 * (at + end))
            )
    return problem_of(rows)


def _busiest(problem: Problem) -> int:
    def changes() -> Iterator[tuple[int, int]]:
        for size, start, end in zip(problem.sizes, problem.starts, problem.ends, strict=True):
            yield start, size
            yield end, -size

    load = highest = busiest = 0
    for time, change in sorted(changes()):
        load += change
        if load > highest:
            load, highest, busiest = load, load, time
    return busiest
