"""Random instances of offset assignment, and a validator of our own: every pair that lives together lies apart.

Kinds: buffers at random, programs that repeat, rectangles cut at random (the optimum is known, and no slack is left);
with alignments, pins and gaps.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import numpy as np

from mosaic.errors import MosaicError
from mosaic.planner.offsets import Problem, Solution, lower_bound, solve
from mosaic.planner.offsets.problem import BufferId

from .findings import Finding, Tally, require

__all__ = ["examine_instance", "perfect_cut", "random_instance"]

QUICK: Final = (
    "first_fit", "best_fit", "greedy_by_size", "greedy_by_area", "greedy_by_conflicts", "skyline", "periodic",
)  # fmt: skip
SEARCHING: Final = ("auto", "exact", "local_search")
NODES: Final = 3_000
"""Placements that a searching solver may try, so that an instance takes the same time everywhere."""
SMALL: Final = 60
"""Buffers of a perfect cut up to which the share solved at the optimum is counted."""


def examine_instance(seed: int, tally: Tally, *, largest: int = 2_000) -> None:
    """Solve one instance by a solver at random and by those that fold and cut, and validate every answer.

    Raises
    ------
    Finding
        If an answer is wrong, or says something untrue of itself.
    """
    rng = random.Random(f"instance/{seed}")
    kind, problem, optimum = random_instance(rng, largest)
    tally.add("instances", f"instances {kind}")
    bound = _load(problem)
    require(
        lower_bound(problem) >= bound, "lower bound", f"{lower_bound(problem)} is below the largest live set {bound}"
    )
    searching = rng.choice(SEARCHING) if len(problem) <= 300 else "auto" if rng.random() < 0.3 else None
    for solver in filter(None, ("periodic", rng.choice(QUICK), searching)):
        try:
            solution = solve(problem, solver=solver, node_limit=NODES, seed=seed)
        except (MosaicError, IndexError, KeyError, ValueError, TypeError, AssertionError) as error:
            raise Finding(
                type(error).__name__, f"{kind} instance, {len(problem)} buffers, {solver}: {error}"
            ) from error
        tally.add("packings", f"packing {solver}")
        _validate(problem, solution, optimum, f"{kind} instance, {len(problem)} buffers, {solver}")
    if optimum is not None and len(problem) <= SMALL and searching is not None:
        tally.add("small perfect cuts", *(["small perfect cuts solved"] if solution.peak_bytes == optimum else []))


# --- instances --------------------------------------------------------------------------------------------------------


def random_instance(rng: random.Random, largest: int) -> tuple[str, Problem, int | None]:
    """An instance of a random kind, with its optimum where that is known."""
    kind = rng.choice(["random", "periodic", "periodic", "perfect", "layered"])
    count = int(10 ** rng.uniform(0.7, np.log10(largest)))
    if kind == "perfect":
        problem, optimum = perfect_cut(rng, count)
        return kind, problem, optimum
    if kind == "periodic":
        return kind, _periodic(rng, count), None
    if kind == "layered":
        return kind, _layered(rng, count), None
    return kind, _scattered(rng, count), None


def perfect_cut(rng: random.Random, count: int) -> tuple[Problem, int]:
    """A rectangle of time and memory, cut at random: packing it again at its height leaves no byte free."""
    time, unit = 4 * count + 8, rng.choice([1, 512])
    height = 8 * count + 8
    pieces = [(0, time, 0, height)]
    while len(pieces) < count:
        at = rng.choices(range(len(pieces)), [(t1 - t0) * (h1 - h0) for t0, t1, h0, h1 in pieces])[0]
        t0, t1, h0, h1 = pieces.pop(at)
        if (rng.random() < 0.5 and t1 - t0 > 1) or h1 - h0 == 1:
            if t1 - t0 == 1:
                pieces.append((t0, t1, h0, h1))
                continue
            cut = rng.randint(t0 + 1, t1 - 1)
            pieces += [(t0, cut, h0, h1), (cut, t1, h0, h1)]
        else:
            cut = rng.randint(h0 + 1, h1 - 1)
            pieces += [(t0, t1, h0, cut), (t0, t1, cut, h1)]
    rng.shuffle(pieces)
    return Problem(
        sizes=[unit * (h1 - h0) for _, _, h0, h1 in pieces], starts=[p[0] for p in pieces], ends=[p[1] for p in pieces]
    ), unit * height


def _scattered(rng: random.Random, count: int) -> Problem:
    """Buffers at random times, some aligned, pinned, aliased or with gaps."""
    span = rng.randint(4, 2 * count + 4)
    starts = [rng.randrange(span) for _ in range(count)]
    ends = [start + 1 + min(int(rng.expovariate(8 / span)), span) for start in starts]
    sizes = [
        rng.choice([0, 1, 3]) if rng.random() < 0.05 else rng.randint(1, 64) * rng.choice([1, 16, 512]) for _ in starts
    ]
    alignments = [rng.choice([1, 2, 64, 512]) for _ in starts] if rng.random() < 0.4 else rng.choice([1, 512])
    gaps = [_gaps(rng, a, b) for a, b in zip(starts, ends, strict=True)] if rng.random() < 0.5 else None
    aliases: dict[BufferId, tuple[BufferId, int]] = {}
    if rng.random() < 0.25:
        roots, unit = range(0, count, 3), 512
        aliases = {
            row: (row // 3 * 3, unit * rng.randint(0, 3))
            for row in range(count)
            if row not in roots and rng.random() < 0.3
        }
    pins = None
    if rng.random() < 0.25 and not aliases:  # far enough apart that they never overlap
        step = max(512, *(-(-size // 512) * 512 for size in sizes))
        pinned = rng.sample(range(count), min(count, rng.randint(1, 3)))
        pins = [pinned.index(row) * step if row in pinned else None for row in range(count)]
    return Problem(sizes=sizes, starts=starts, ends=ends, alignments=alignments, gaps=gaps, pins=pins, aliases=aliases)


def _gaps(rng: random.Random, start: int, end: int) -> list[tuple[int, int]]:
    if end - start < 3 or rng.random() < 0.6:
        return []
    times = sorted(rng.sample(range(start + 1, end), 2 * rng.randint(1, min(2, (end - start - 1) // 2))))
    return list(zip(times[::2], times[1::2], strict=True))


def _periodic(rng: random.Random, count: int) -> Problem:
    """A body that repeats, with lifetimes that reach into the next repetitions, and what comes before and after it."""
    run = rng.randint(1, 12)
    repeats = max(2, count // run)
    length = rng.randint(run, 2 * run + 2)
    multiple = rng.randint(1, 5)  # sizes change places from one repetition to the next
    sizes = [[rng.randint(1, 9) for _ in range(run)] for _ in range(multiple if rng.random() < 0.4 else 1)]
    begins = sorted(rng.randrange(length) for _ in range(run))
    lasts = [begin + 1 + rng.randrange(rng.choice([1, 3, length * 2])) for begin in begins]
    columns: list[tuple[int, int, int]] = [
        (sizes[i % len(sizes)][j], i * length + begins[j], i * length + lasts[j])
        for i in range(repeats)
        for j in range(run)
    ]
    total = repeats * length
    for _ in range(rng.randint(0, 5)):
        start = rng.choice([rng.randint(0, 2), total - rng.randint(0, 3)])
        columns.append((rng.randint(1, 30), start, start + 1 + rng.randrange(rng.choice([2, 4, total]))))
    if rng.random() < 0.3:
        rng.shuffle(columns)
    return Problem(sizes=[c[0] for c in columns], starts=[c[1] for c in columns], ends=[c[2] for c in columns])


def _layered(rng: random.Random, count: int) -> Problem:
    """A chain of ops with short-lived buffers and some skips."""
    sizes = [512 * rng.choice([1, 2, 4, 8, rng.randint(1, 40)]) for _ in range(count)]
    ends = [i + 2 + (rng.randrange(count) if rng.random() < 0.05 else 0) for i in range(count)]
    return Problem(sizes=sizes, starts=range(count), ends=ends, alignments=512)


# --- judging ----------------------------------------------------------------------------------------------------------


def _parts(problem: Problem) -> list[tuple[int, int, int]]:
    """(row, start, end) of what every buffer occupies, gaps left out."""
    found = []
    for row, (start, end) in enumerate(zip(problem.starts, problem.ends, strict=True)):
        at = start
        for low, high in problem.gaps[row] if problem.gaps is not None else ():
            found.append((row, at, low))
            at = high
        found.append((row, at, end))
    return [part for part in found if part[1] < part[2]]


def _load(problem: Problem) -> int:
    """Bytes of the largest live set, by counting at every moment at which something begins."""
    parts = [part for part in _parts(problem) if part[0] not in problem.aliases]  # an alias adds nothing for certain
    if not parts:
        return 0
    rows, starts, ends = (np.array(column) for column in zip(*parts, strict=True))
    sizes = np.array(problem.sizes, dtype=np.int64)[rows]
    return int(max(sizes[(starts <= t) & (t < ends)].sum() for t in np.unique(starts)))


def _validate(problem: Problem, solution: Solution, optimum: int | None, where: str) -> None:
    offsets = solution.offsets
    require(len(offsets) == len(problem), "packing", f"{where}: {len(offsets)} offsets")
    for row, offset in enumerate(offsets):
        require(offset >= 0 and offset % problem.alignment(row) == 0, "packing", f"{where}: buffer {row} at {offset}")
        pin = problem.pins[row] if problem.pins is not None else None
        require(pin is None or pin == offset, "packing", f"{where}: buffer {row} pinned at {pin} lies at {offset}")
    for member, (root, distance) in problem.aliases.items():
        require(
            offsets[int(member)] == offsets[int(root)] + distance,
            "packing",
            f"{where}: alias {member} of {root} at {offsets[int(member)]}",
        )
    clash = _clash(problem, offsets)
    require(clash is None, "packing", f"{where}: buffers {clash} overlap")
    peak = max((o + s for o, s in zip(offsets, problem.sizes, strict=True)), default=0)
    require(peak == solution.peak_bytes, "packing", f"{where}: peak {peak}, said {solution.peak_bytes}")
    bound = _load(problem)
    require(
        bound <= solution.lower_bound_bytes <= peak,
        "packing",
        f"{where}: lower bound {solution.lower_bound_bytes}, load {bound}, peak {peak}",
    )
    require(
        not solution.optimal or optimum is None or peak == optimum,
        "packing",
        f"{where}: {peak} called optimal, {optimum} is",
    )
    require(
        solution.optimal or peak > solution.lower_bound_bytes, "packing", f"{where}: at the bound, not called optimal"
    )
    require(not solution.infeasible, "packing", f"{where}: called infeasible")


def _clash(problem: Problem, offsets: Sequence[int]) -> tuple[int, int] | None:
    """Two buffers of different alias groups that share a byte at one time, pair by pair."""
    parts = [part for part in _parts(problem) if problem.sizes[part[0]]]
    if not parts:
        return None
    rows, starts, ends = (np.array(column) for column in zip(*parts, strict=True))
    groups = np.array([problem.aliases.get(int(row), (row, 0))[0] for row in rows])
    low = np.array(offsets, dtype=np.int64)[rows]
    high = low + np.array(problem.sizes, dtype=np.int64)[rows]
    for i in range(len(rows)):
        rest = slice(i + 1, None)
        meets = (starts[rest] < ends[i]) & (starts[i] < ends[rest]) & (low[rest] < high[i]) & (low[i] < high[rest])
        meets &= groups[rest] != groups[i]
        if meets.any():
            return int(rows[i]), int(rows[rest][meets][0])
    return None
