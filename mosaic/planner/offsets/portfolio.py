"""One function over all solvers: cheap ones first, and stop as soon as the peak is at the lower bound or the given capacity.

Then exact searches take turns, several preorders at several capacities, the lower bound first, without ever starting
over; local search takes its turn too. Turns are counted in placements, so without a timeout the same problem gives
the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from types import MappingProxyType

from mosaic.errors import MosaicError, UnknownName

from . import compiled
from .blocks import Blocks, Tick, blocks_of
from .branching import advance
from .ejection import squeeze
from .exact import FAILED, LANES, RUNNING, SOLVED, Layout, Search, layout_of
from .greedy import greedy_by_area, greedy_by_conflicts, greedy_by_size
from .incumbent import Incumbent, OutOfTime
from .local_search import LocalSearch
from .online import best_fit, first_fit
from .periodic import fold
from .problem import Problem, Solution
from .skyline import PREORDERS, skyline

SOLVERS: Mapping[str, str] = MappingProxyType(
    {
        "auto": "the portfolio: cheap ones first, then exact and local search in turns",
        "first_fit": "program order, lowest hole",
        "best_fit": "program order, smallest hole",
        "greedy_by_size": "largest first, lowest hole",
        "greedy_by_area": "largest size times lifetime first, lowest hole",
        "greedy_by_conflicts": "most simultaneous buffers first, lowest hole",
        "skyline": "always the buffer that can lie lowest; the best of four preorders",
        "periodic": "one period of a repeating program, solved exactly and tiled",
        "ejection": "squeezes blocks under a target, throws out what is in the way; for thousands of buffers",
        "local_search": "late acceptance over the drop order",
        "exact": "branch and bound, several preorders and capacities in turns",
        "ilp": "integer program with PuLP and CBC (extra: solve)",
        "cpsat": "constraint program with OR-Tools CP-SAT (extra: solve)",
    }
)
"""Solvers by name, with what they do."""

Placer = Callable[[Blocks], Sequence[int]]
"""A solver of the caller's own: one offset in bytes per block."""

DEFAULT_NODES = 100_000
"""Placements tried where neither a timeout nor a node limit is given: about a second compiled."""

_PURE_NODES = 500  # placements before numba is loaded (half a second): about 0.1 s in plain Python
_WINDOW_BLOCKS = 150  # one period of a model is 10 to 30
_RUNGS = 5  # capacities asked for at the same time
_FIRST_TURN, _LONGEST_TURN, _STRIDE = 500, 8_000, 100
_MOVES_PER_NODE = 0.25  # local search: a move costs about four placements
_LAYOUT_S = 8e-6  # seconds at most that a pair of blocks takes to be laid out for exact search
_NODES_PER_EJECTION = 20  # putting back one block among thousands takes as long as that many placements
_MANY_BLOCKS, _MANY_PAIRS, _MANY_CELLS = 3_000, 3_000_000, 9_000_000  # above these, exact search takes too much memory


def solve(
    problem: Problem,
    *,
    solver: str = "auto",
    timeout_s: float | None = None,
    node_limit: int | None = None,
    seed: int = 0,
    placers: Mapping[str, Placer] | None = None,
) -> Solution:
    """Give every buffer an offset.

    Every solver's answer is checked before it is used. One that does not hold is dropped, logged with the solver's
    name, and the next solver asked.

    Parameters
    ----------
    problem : Problem
        What to place. The first answer within its capacity is returned; where it is proven too small, any answer.
    solver : str
        A key of `SOLVERS`.
    timeout_s : float, optional
        Seconds of wall time for the searching solvers. The clock is read only if this is given; results may then differ
        from run to run.
    node_limit : int, optional
        Placements to try in all; with neither limit, `DEFAULT_NODES`.
    seed : int
        Of the local search.
    placers : mapping of str to function, optional
        The caller's own solvers by name, asked before the others: each takes `Blocks` and returns one offset per block.

    Returns
    -------
    Solution
        Valid always; `optimal` if that is proven, `infeasible` if the capacity is proven too small.

    Raises
    ------
    UnknownName
        For a solver that is not in `SOLVERS`.
    MissingExtra
        For `ilp` and `cpsat` without their packages.
    MosaicError
        If no solver gave an answer that holds.

    Examples
    --------
    >>> solution = solve(Problem(sizes=[4, 4, 8], starts=[0, 1, 2], ends=[2, 3, 4]))
    >>> solution.peak_bytes, solution.optimal
    (12, True)
    """
    if solver not in SOLVERS:
        raise UnknownName("solver", solver, SOLVERS)
    blocks = blocks_of(problem)
    best = Incumbent(blocks, timeout_s)
    if len(blocks) == 0:
        best.offer([], solver if solver != "auto" else "first_fit")
        return best.solution()
    for name, place in (placers or {}).items():
        best.offer(place(blocks), name)
    if best.done:
        return best.solution()
    with suppress(OutOfTime):
        if solver in ("ilp", "cpsat"):
            _by_model(blocks, best, solver, timeout_s, seed)
        else:
            nodes = node_limit if node_limit is not None else DEFAULT_NODES if timeout_s is None else None
            _STRATEGIES[solver](blocks, best, nodes, seed)
    _first_answer(blocks, best)
    return best.solution()


def _portfolio(blocks: Blocks, best: Incumbent, nodes: int | None, seed: int) -> None:
    for name, offsets in _cheap(blocks, best):
        best.offer(offsets, name)
        if best.done:
            return
    _periodic(blocks, best, nodes, seed)
    if not best.done and _searchable(blocks, best):
        _exact(blocks, best, nodes, seed, local=True)
    elif not best.done:
        _ejection(blocks, best, nodes, seed)


def _cheap(blocks: Blocks, best: Incumbent) -> Iterator[tuple[str, list[int]]]:
    """Yield heuristic answers, the likeliest to reach the lower bound first; of many blocks, the quickest first."""
    if len(blocks) > _MANY_BLOCKS:
        yield "best_fit", best_fit(blocks)  # some answer there has to be, however late it is
        yield "greedy_by_size", greedy_by_size(blocks, best.tick)
        yield "first_fit", first_fit(blocks, best.tick)
        return
    yield "greedy_by_size", greedy_by_size(blocks, best.tick)
    yield "best_fit", best_fit(blocks, best.tick)
    yield "greedy_by_area", greedy_by_area(blocks, best.tick)
    if len(blocks) > _WINDOW_BLOCKS:  # the skyline of a stack of layers takes seven times as long as that of one layer
        for folded in islice(fold(blocks), 1):
            yield "periodic", folded.unfold(skyline(folded.window, tick=best.tick))
    for keys in PREORDERS:
        yield "skyline", skyline(blocks, keys, best.tick)
    yield "first_fit", first_fit(blocks, best.tick)


def _skylines(blocks: Blocks, best: Incumbent, nodes: int | None, seed: int) -> None:
    for keys in PREORDERS:
        best.offer(skyline(blocks, keys, best.tick), "skyline")
        if best.done:
            return


def _once(
    name: str, place: Callable[[Blocks, Tick], list[int]]
) -> Callable[[Blocks, Incumbent, int | None, int], None]:
    def run(blocks: Blocks, best: Incumbent, nodes: int | None, seed: int) -> None:
        best.offer(place(blocks, best.tick), name)

    return run


def _start(blocks: Blocks, best: Incumbent) -> None:
    """Offer a first answer; the skyline in plain Python takes minutes for tens of thousands of blocks."""
    if len(blocks) <= _MANY_BLOCKS:
        best.offer(skyline(blocks, tick=best.tick), "skyline")
    else:
        best.offer(greedy_by_size(blocks, best.tick), "greedy_by_size")
    _first_answer(blocks, best)


def _first_answer(blocks: Blocks, best: Incumbent) -> None:
    """Ask cheap solvers in turn where no answer that holds is known, however late it is."""
    others = _cheap(blocks, Incumbent(blocks, None))
    while best.offsets is None:
        name, offsets = next(others, ("", None))
        if offsets is None:
            raise MosaicError(
                f"no solver gave an answer that holds for {len(blocks)} blocks; this is a fault of Mosaic"
            )
        best.offer(offsets, name)


def _periodic(blocks: Blocks, best: Incumbent, nodes: int | None, seed: int) -> None:
    """Solve one period of a repeating program and tile it; no repetition, only the first answer."""
    if best.offsets is None:
        _start(blocks, best)
    for folded in fold(blocks):
        window = folded.window
        inner = Incumbent(window, None)
        for name, offsets in _cheap(window, inner):
            best.tick()
            inner.offer(offsets, name)
        if not inner.done and len(window) <= _WINDOW_BLOCKS:
            _search(window, inner, min(_PURE_NODES, nodes or _PURE_NODES), fast=False)
        if inner.offsets is not None:
            best.offer(folded.unfold(inner.offsets), "periodic")
        if best.done:
            return


def _local(blocks: Blocks, best: Incumbent, nodes: int | None, seed: int) -> None:
    _start(blocks, best)
    if best.done or len(blocks) > _MANY_BLOCKS:
        return
    assert best.offsets is not None
    fast = compiled.available()
    search = LocalSearch(blocks, layout_of(blocks), best.offsets, seed=seed, fast=fast)
    spent, turn = 0, 1_000 if fast else 50
    while not best.done and not best.late and (nodes is None or spent * 4 < nodes):
        if search.advance(turn, best.goal) < best.peak:
            best.offer(search.offsets(), "local_search")
        spent += turn


def _exact_alone(blocks: Blocks, best: Incumbent, nodes: int | None, seed: int) -> None:
    _start(blocks, best)
    if not best.done:
        _exact(blocks, best, nodes, seed, local=False)


def _exact(blocks: Blocks, best: Incumbent, nodes: int | None, seed: int, *, local: bool) -> None:
    """Search in plain Python for a moment, then compiled."""
    if not _searchable(blocks, best):
        return
    first = _PURE_NODES if nodes is None else min(nodes, _PURE_NODES)
    if not compiled.available():
        _search(blocks, best, nodes, fast=False, seed=seed if local else None)
        return
    if len(blocks) <= 60:
        _search(blocks, best, first, fast=False)
    if not best.done:
        _search(blocks, best, nodes, fast=True, seed=seed if local else None)


def _searchable(blocks: Blocks, best: Incumbent) -> bool:
    """Return whether exact search has the memory for it, and the time to lay it out."""
    few = len(blocks) <= _MANY_BLOCKS and blocks.num_pairs <= _MANY_PAIRS
    quick = best.seconds_left > _LAYOUT_S * blocks.num_pairs
    return few and quick and len(blocks) * blocks.sections.count <= _MANY_CELLS


def _ejection(blocks: Blocks, best: Incumbent, nodes: int | None, seed: int) -> None:
    if best.offsets is None:
        _start(blocks, best)
    if not best.done and blocks.pieces is None and blocks.pins is None:
        squeeze(blocks, best, None if nodes is None else nodes // _NODES_PER_EJECTION)


class _Rung:
    """Searches for one capacity, one per lane."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._searches: dict[int, Search] = {}

    def search(self, layout: Layout, lane: int, fast: bool) -> Search:
        """Return the search of a lane, begun at its first turn."""
        if lane not in self._searches:
            self._searches[lane] = Search(layout, self.capacity, fast=fast, lane=lane)
        return self._searches[lane]


def _search(blocks: Blocks, best: Incumbent, nodes: int | None, *, fast: bool, seed: int | None = None) -> None:
    """Let exact searches (and local search, given a seed) take turns until proven, out of nodes or out of time."""
    layout = layout_of(blocks)
    step = math.gcd(*blocks.sizes) if blocks.alignments is None and blocks.pins is None else 1
    rungs = [_Rung(best.bound)]  # the first turn asks for no step between bound and peak: often one dive is enough
    if blocks.capacity is not None and best.bound < blocks.capacity < best.peak:
        rungs.append(_Rung(blocks.capacity // step * step))
    turn, spent = max(_FIRST_TURN, 2 * len(blocks)), 0
    local: LocalSearch | None = None
    if fast:
        compiled.compiled(advance)
    with ThreadPoolExecutor(LANES if fast else 1) as pool:
        while not best.done and not best.late and (nodes is None or spent < nodes):
            shares = [max(1, len(rungs) - 1), *(1 for _ in rungs[1:])]  # half of all placements ask for the bound
            quota = turn if nodes is None else min(turn, (nodes - spent) // (LANES * sum(shares)) + 1)
            for rung, share in zip(rungs, shares, strict=True):
                lanes = [rung.search(layout, lane, fast) for lane in range(LANES)]
                before = [task.nodes for task in lanes]
                statuses = list(pool.map(partial(_take_turn, quota=share * quota, best=best), lanes))
                spent += sum(task.nodes for task in lanes) - sum(before)
                for task, status in zip(lanes, statuses, strict=True):
                    if status == SOLVED and task.capacity < best.peak:
                        best.offer(task.offsets(blocks), "exact")
                    elif status == FAILED:
                        best.refute(task.capacity, step, "exact")
                if best.done or best.late:
                    return
            if seed is not None:
                assert best.offsets is not None
                local = local or LocalSearch(blocks, layout, best.offsets, seed=seed, fast=fast)
                if local.advance(int(turn * _MOVES_PER_NODE), best.goal) < best.peak:
                    best.offer(local.offsets(), "local_search")
                if best.done:
                    return
            turn = max(turn, min(2 * turn, _LONGEST_TURN))
            begun = {rung.capacity: rung for rung in rungs}
            asked = capacities_to_ask(list(begun), best.bound, best.peak, step, blocks.capacity)
            rungs = [begun.get(value) or _Rung(value) for value in asked]


def _take_turn(task: Search, *, quota: int, best: Incumbent) -> int:
    """Advance a search by its quota, in strides short enough to notice a timeout."""
    for stride in range(0, quota, _STRIDE):
        if best.late or task.advance(min(_STRIDE, quota - stride)) != RUNNING:
            break
    return task.status


def capacities_to_ask(held: Sequence[int], bound: int, peak: int, step: int, capacity: int | None) -> list[int]:
    """Return the capacities to ask for: the bound, then the given capacity, else steps between bound and peak.

    `held` are the capacities asked for so far, `step` bytes divide every peak.

    Examples
    --------
    >>> capacities_to_ask([1000], 1000, 2000, 100, None)
    [1000, 1500, 1700, 1800, 1900]
    """
    room = (peak - bound) // step
    kept = {value for value in held if bound <= value < peak}
    if capacity is not None and bound < capacity < peak:
        kept.add(capacity // step * step)
    elif len(kept) < 4:
        kept.update(bound + step * (room * part // 8) for part in (4, 6, 7))
        kept.add(peak - step)
    elif max(kept) < peak - step * (room // 4):  # the steps that were near are far by now: ask for a little less again
        kept.update((peak - step, bound + step * (room * 7 // 8)))
    # else let searches under way go on rather than ask much the same again
    above = sorted(value for value in kept if bound < value < peak)
    return [bound, *above[1 - _RUNGS :]]


def _by_model(blocks: Blocks, best: Incumbent, solver: str, timeout_s: float | None, seed: int) -> None:
    """Hand the problem to an outside solver, with the best cheap answer as a start."""
    for name, offsets in _cheap(blocks, best):
        best.offer(offsets, name)
    _first_answer(blocks, best)
    if best.done:
        return
    if solver == "ilp":
        from .ilp import solve_ilp

        outcome = solve_ilp(blocks, best.peak, timeout_s=timeout_s)
    else:
        from .cpsat import solve_cpsat

        outcome = solve_cpsat(blocks, best, timeout_s=timeout_s, seed=seed)
    best.raise_bound(outcome.bound, solver)
    if outcome.offsets is not None:
        best.offer(outcome.offsets, solver)
        if outcome.exhausted and blocks.peak(outcome.offsets) == best.peak:  # no proof by an answer that was dropped
            best.raise_bound(best.peak, solver)


_STRATEGIES: dict[str, Callable[[Blocks, Incumbent, int | None, int], None]] = {
    "auto": _portfolio,
    "first_fit": _once("first_fit", first_fit),
    "best_fit": _once("best_fit", best_fit),
    "greedy_by_size": _once("greedy_by_size", greedy_by_size),
    "greedy_by_area": _once("greedy_by_area", greedy_by_area),
    "greedy_by_conflicts": _once("greedy_by_conflicts", greedy_by_conflicts),
    "skyline": _skylines,
    "periodic": _periodic,
    "ejection": _ejection,
    "local_search": _local,
    "exact": _exact_alone,
}
