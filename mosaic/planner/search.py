"""The bottleneck-driven search for a configuration, and the brute-force search it is compared with.

The objective is the least predicted time within the budget; within 0.25 % of that time the least host memory, the lowest
peak, the fewest moves, then a fixed order. The search starts from the fastest configuration. It finds the live set that
the dominating live set and takes the cheapest move that lowers it, until the plan fits or no move lowers it (Mosaic,
section 4.4, where the moves are K_logits and K_FFN). Here a chunk that costs no time is taken from the start. Chunks
that cost time are taken lazily, as in the paper.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import product
from math import inf
from typing import NamedTuple, TypeAlias

from mosaic.planner.space import Config, Point

Rung: TypeAlias = tuple[str, ...]
"""An option of every choice."""

TOLERANCE = 0.0025
"""Share of time within which two configurations count as equally fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStep:
    """One configuration that the search visited, and the move that led to it."""

    config: Config
    move: str
    at: int
    peak_bytes: int
    total_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The configuration found; if none fits, the one with the lowest peak."""

    config: Config
    fits: bool
    seconds: float
    evaluations: int
    trace: tuple[TraceStep, ...]


def search(point: Point, budget_bytes: int, host_budget_bytes: int = 0) -> SearchResult:
    """Find the best configuration within the budgets: one descent per combination of choices that could still win."""
    before = point.evaluations
    runs: list[_Run] = []
    limit = inf
    starts = [(_fastest(point, base), ladders) for base, ladders in groups(point)]
    for start, ladders in sorted(starts, key=lambda group: point.seconds(group[0])):
        if point.seconds(start) > limit:
            break  # even its fastest setting is slower than the best so far
        for run in _climb(point, start, ladders, budget_bytes, host_budget_bytes, limit):
            runs.append(run)
            if run.fits:
                limit = min(limit, point.seconds(run.config) * (1 + TOLERANCE))
    feasible = [run for run in runs if run.fits]
    if not feasible:
        config = lowest(point, host_budget_bytes)
        held = [run for run in runs if point.host_bytes(run.config.choices) <= host_budget_bytes] or runs
        trace = min(held, key=lambda run: point.total_bytes(run.config)).trace
    else:
        settled = [
            _settle(point, run.config, limit, run.trace) for run in feasible if point.seconds(run.config) <= limit
        ]
        config, trace = min(settled, key=lambda item: _preference(point, item[0]))
    return SearchResult(
        config=config, fits=bool(feasible), seconds=point.seconds(config), evaluations=point.evaluations - before,
        trace=tuple(trace),
    )  # fmt: skip


def brute_force(point: Point, budget_bytes: int, host_budget_bytes: int = 0) -> SearchResult:
    """Evaluate the whole grid and apply the objective exactly: the baseline of Mosaic, figures 15 to 17."""
    before = point.evaluations
    feasible = [
        config for config in whole_grid(point, host_budget_bytes) if point.fits(config, budget_bytes, host_budget_bytes)
    ]
    if feasible:
        limit = min(map(point.seconds, feasible)) * (1 + TOLERANCE)
        config = min((c for c in feasible if point.seconds(c) <= limit), key=lambda c: _preference(point, c))
    else:
        config = lowest(point, host_budget_bytes)
    return SearchResult(
        config=config,
        fits=bool(feasible),
        seconds=point.seconds(config),
        evaluations=point.evaluations - before,
        trace=(),
    )


def lowest(point: Point, host_budget_bytes: int = 0) -> Config:
    """Return the configuration with the lowest total: the floor of the model at these dims."""
    equals = smallest(point, host_budget_bytes, slack=0)
    return min(equals, key=lambda c: (point.total_bytes(c), *_preference(point, c)))


def _preference(point: Point, config: Config) -> tuple[int, int, int, float, int]:
    """Less host memory, a lower peak in whole pages, fewer moves, less time, a fixed order."""
    combination = point.choice_combinations.index(config.choices)
    moves = sum(rows is not None for rows in config.rows) + sum(
        option != options[0] for option, options in zip(config.choices, point.choice_options, strict=True)
    )
    return point.host_bytes(config.choices), point.total_bytes(config), moves, point.seconds(config), combination


class _Run(NamedTuple):
    """The end of one descent."""

    fits: bool
    config: Config
    trace: list[TraceStep]


def _climb(
    point: Point, start: Config, ladders: list[list[Rung]], budget_bytes: int,
    host_budget_bytes: int, limit: float,
) -> Iterator[_Run]:  # fmt: skip
    """Descend with nothing escalated; if that does not fit, from the lowest rung of each ladder that fits."""
    run = _descend(point, start, budget_bytes)
    if point.host_bytes(start.choices) > host_budget_bytes:
        run = run._replace(fits=False)
    yield run
    if run.fits or not host_budget_bytes:
        return
    for ladder in ladders:
        for run in _fitting_rungs(point, affordable(point, ladder, host_budget_bytes), budget_bytes, limit):
            yield run
            limit = min(limit, point.seconds(run.config) * (1 + TOLERANCE))


def _fitting_rungs(point: Point, rungs: Sequence[Rung], budget_bytes: int, limit: float) -> Iterator[_Run]:
    """Descents from the highest rung, if it fits, down to the lowest that fits. Few are evaluated: each needs a body.

    Higher rungs need less of the device and take no less time. So the highest rung says whether any fits, the lowest
    whether any is fast enough, and bisection finds the first that fits. That need not be the fastest: memory freed by a
    higher rung may save chunks.
    """
    if not rungs:
        return
    run = _descend(point, _fastest(point, rungs[-1]), budget_bytes)
    if not run.fits or (limit < inf and point.seconds(_fastest(point, rungs[0])) > limit):
        return
    runs = [run]

    def fitting(rung: Rung) -> bool:
        runs.append(_descend(point, _fastest(point, rung), budget_bytes))
        return runs[-1].fits

    bisect_left(rungs[:-1], True, key=fitting)
    yield from (run for run in runs if run.fits)


def _descend(point: Point, config: Config, budget_bytes: int) -> _Run:
    """Descend from the fastest setting to one that fits, then undo moves that turn out needless."""
    trace = [trace_step(point, config, "the fastest configuration")]
    while point.total_bytes(config) > budget_bytes:
        moves = list(_lowering(point, config))
        if not moves:
            return _Run(False, config, trace)
        config, move = _cheapest(moves)
        trace.append(trace_step(point, config, move))
    for better, move in _relaxations(point, config, budget_bytes):
        config = better
        trace.append(trace_step(point, config, move))
    return _Run(True, config, trace)


def _fastest(point: Point, choices: Rung) -> Config:
    """Every knob at its own fastest setting (their times add); off if equally fast."""
    return Config(choices, tuple(point.by_time(choices, knob)[0] for knob in range(len(point.space.template.knobs))))


def _with(config: Config, knob: int, rows: int | None) -> Config:
    return Config(config.choices, (*config.rows[:knob], rows, *config.rows[knob + 1 :]))


def _describe(point: Point, knob: int, rows: int | None) -> str:
    name = point.space.template.knobs[knob].name
    return f"{name} off" if rows is None else f"{name} in chunks of {rows:,}"


def _lowering(point: Point, config: Config) -> Iterator[tuple[float, Config, str]]:
    """For each knob the cheapest smaller setting that lowers the dominating live sets, with its time.

    It need not be the next smaller one: rates are not smooth in rows, so a smaller chunk can be faster.
    """
    now = point.dominating(config)
    for knob, rows in enumerate(config.rows):
        smallest = point.options(config.choices, knob)[-1]
        if point.dominating(_with(config, knob, smallest)) >= now:
            continue
        for setting in point.by_time(config.choices, knob):
            if setting is None or (rows is not None and setting >= rows):
                continue
            moved = _with(config, knob, setting)
            if point.dominating(moved) < now:
                yield point.seconds(moved), moved, _describe(point, knob, setting)
                break


def _cheapest(moves: list[tuple[float, Config, str]]) -> tuple[Config, str]:
    """The move with the least time; of equal ones the first, which has the larger chunk."""
    _, config, move = min(moves, key=lambda item: item[0])
    return config, move


def _relaxations(point: Point, config: Config, budget_bytes: int) -> Iterator[tuple[Config, str]]:
    """Undo moves that later ones made needless: take any faster setting of one knob that still fits, or of two knobs
    whose loops nest, where one may have to shrink for the other."""
    improved = True
    while improved:
        improved = False
        for knob in range(len(config.rows)):
            for rows in point.by_time(config.choices, knob):
                faster = _with(config, knob, rows)
                if point.seconds(faster) >= point.seconds(config):
                    break
                if point.total_bytes(faster) <= budget_bytes:
                    config = faster
                    improved = True
                    yield config, _describe(point, knob, rows)
                    break
        for outer, inner in point.nested_knobs(config.choices):
            traded = _traded(point, config, outer, inner, budget_bytes)
            if point.seconds(traded) < point.seconds(config):
                config, improved = traded, True
                moves = (_describe(point, knob, config.rows[knob]) for knob in (outer, inner))
                yield config, ", ".join(moves)


def _traded(point: Point, config: Config, outer: int, inner: int, budget_bytes: int) -> Config:
    """The fastest pair of settings of two knobs that fits; at worst the given configuration, which fits."""
    pairs = product(point.options(config.choices, outer), point.options(config.choices, inner))
    candidates = sorted((config, *(_with(_with(config, outer, a), inner, b) for a, b in pairs)), key=point.seconds)
    return next(c for c in candidates if c is config or point.total_bytes(c) <= budget_bytes)


def _settle(point: Point, config: Config, limit: float, trace: list[TraceStep]) -> tuple[Config, list[TraceStep]]:
    """Take every move that lowers the peak within the time tolerance, then drop needless ones."""
    while True:
        moves = [move for move in _lowering(point, config) if point.seconds(move[1]) <= limit]
        if not moves:
            break
        config, move = _cheapest(moves)
        trace.append(trace_step(point, config, f"{move} (within the tolerance)"))
    for knob in range(len(config.rows)):
        for rows in point.options(config.choices, knob):
            kept = _with(config, knob, rows)
            if rows == config.rows[knob] or (
                point.total_bytes(kept) <= point.total_bytes(config) and point.seconds(kept) <= limit
            ):
                break
        if kept != config:
            config = kept
            trace.append(trace_step(point, config, f"{_describe(point, knob, rows)} (nothing gained by less)"))
    return config, trace


def trace_step(point: Point, config: Config, move: str) -> TraceStep:
    """Return the trace's record of a configuration, at its lower bound."""
    values = point.form_values(config)
    formula = point.space.variant(config).formula
    return TraceStep(
        config=config, move=move, at=formula.at[int(values.argmax())], peak_bytes=int(values.max()),
        total_bytes=point.total_bytes(config), seconds=point.seconds(config),
    )  # fmt: skip


# -- combinations of choices that may fit a request -------------------------------------------------------------------
#
# Each rung of a ladder needs less of the device than the one before, and more of the host. So a few rungs, each a compiled
# body, decide for all of them.


def groups(point: Point) -> Iterator[tuple[Rung, list[list[Rung]]]]:
    """Yield each combination of the plain choices, with nothing escalated, and its ladders.

    A last rung that does not need less of the device, as may be with returned logits, is left out.
    """

    def least(choices: Rung) -> int:
        return point.total_bytes(point.lowest(choices))

    for base, ladders in point.ladders():
        for rungs in ladders:
            while len(rungs) > 1 and "logit_rows" in point.dims and least(rungs[-1]) >= least(rungs[-2]):
                rungs.pop()
        yield base, ladders


def whole_grid(point: Point, host_budget_bytes: int = 0) -> Iterator[Config]:
    """Yield every configuration of the grid that the host has room for, in a fixed order."""
    combinations = dict[Rung, None]()
    for base, ladders in groups(point):
        combinations[base] = None
        for ladder in ladders if host_budget_bytes else ():
            combinations.update(dict.fromkeys(affordable(point, ladder, host_budget_bytes)))
    for choices in combinations:
        yield from point.configs(choices)


def smallest(point: Point, host_budget_bytes: int = 0, *, slack: float = inf) -> Iterator[Config]:
    """Yield the configuration with the lowest total, then the others with up to `slack` bytes more.

    There is one per combination of plain choices and per ladder: the one with the least device memory for which the
    host has room. If the host has room for none, those with nothing escalated are yielded.

    The highest rung bounds the other rungs of its ladder from below, so their bodies are compiled only if the bound is
    low enough.
    """
    found = list(groups(point))
    bases = [[base] for base, _ in found]
    ladders = [ladder for _, several in found for ladder in several if ladder and host_budget_bytes]
    held = [point.lowest(rungs[-1]) for rungs in (*bases, *ladders)]
    waiting: list[tuple[int, int, Sequence[Rung]]] = [
        (point.total_bytes(held[k]), k, rungs) for k, rungs in enumerate((*bases, *ladders))
    ]
    heapify(waiting)
    given, most = set[Config](), inf
    while waiting and waiting[0][0] <= most:
        total, k, rungs = heappop(waiting)
        room = affordable(point, rungs, host_budget_bytes)
        if room and len(room) < len(rungs):
            held[k] = point.lowest(room[-1])
            heappush(waiting, (point.total_bytes(held[k]), k, room))
        elif room and held[k] not in given:
            most = min(most, total + slack)
            given.add(held[k])
            yield held[k]
    if not given:
        yield from sorted(held[: len(bases)], key=point.total_bytes)


def affordable(point: Point, ladder: Sequence[Rung], host_budget_bytes: int) -> Sequence[Rung]:
    """Return the lower rungs of a ladder for which the host has room; higher ones need more of it."""
    if not ladder or point.host_bytes(ladder[-1]) <= host_budget_bytes:
        return ladder
    low, high = 0, len(ladder) - 1
    for k, rung in enumerate(ladder[:-1]):
        if point.space.has_counted(rung, "host"):  # its body is compiled, so the question is cheap
            low, high = (k + 1, high) if point.host_bytes(rung) <= host_budget_bytes else (low, min(k, high))
    return ladder[: bisect_right(ladder, host_budget_bytes, low, high, key=point.host_bytes)]
