"""The bottleneck-driven search against brute force, and first-fit against an ILP (Mosaic, figures 16 to 18)."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.record import environment, source_line, table, write
from mosaic.models import PRESETS
from mosaic.planner import Planner, Request
from mosaic.planner.limits import smallest_total
from mosaic.planner.offsets import blocks_of
from mosaic.planner.offsets.ilp import solve_ilp
from mosaic.planner.placement import place, problem_of
from mosaic.planner.search import brute_force, search, whole_grid
from mosaic.planner.space import Config, Point, Space
from mosaic.units import GIB

DEVICES = ("rtx-3090", "a100-40g", "h200")
CONTEXTS = (1024, 8192, 32768, 131072)
RATIOS = (0.1, 0.9)
SLACKS = (0.999, 1.0, 1.01, 1.1, 1.5)
ILP_SECONDS = 10


def compare_searches(model: str) -> dict[str, Any]:
    """Feasibility, time and effort of both searches over the grid."""
    rows = []
    for device in DEVICES:
        space = Planner(model, device=device).space()
        for tokens, ratio in itertools.product(CONTEXTS, RATIOS):
            dims = Request(seq_lens=(tokens,), mask_ratio=ratio).size.dims()
            floor = smallest_total(space.at(dims))[0]
            for slack in SLACKS:
                rows.append(_compare_once(space, dims, int(floor * slack)))
    fitting = [row for row in rows if row["fits"]]
    return {
        "requests": len(rows),
        "same_feasibility": sum(row["agree"] for row in rows),
        "worst_time_ratio": max(row["time_ratio"] for row in fitting),
        "evaluations": statistics.mean(row["evaluations"][0] for row in rows),
        "evaluations_brute_force": statistics.mean(row["evaluations"][1] for row in rows),
        "ms": statistics.median(row["ms"][0] for row in rows),
        "ms_brute_force": statistics.median(row["ms"][1] for row in rows),
    }


def _compare_once(space: Space, dims: dict[str, int], budget: int) -> dict[str, Any]:
    found, best, times = None, None, []
    for method in (search, brute_force):
        point = space.at(dims)
        began = time.perf_counter()
        result = method(point, budget)
        times.append((time.perf_counter() - began) * 1e3)
        found, best = (result, best) if method is search else (found, result)
    assert found is not None and best is not None
    return {
        "fits": best.fits, "agree": found.fits == best.fits, "time_ratio": found.seconds / best.seconds,
        "evaluations": (found.evaluations, best.evaluations), "ms": times,
    }  # fmt: skip


def compare_limits(model: str, device: str, budget: int) -> dict[str, Any]:
    """L_max of the planner, and of a search that evaluates the whole grid at every length."""
    planner = Planner(model, device=device, budget=budget)
    request = Request(seq_lens=(1,))
    space = planner.space()
    heuristic = planner.max_context(request)

    def fits(tokens: int) -> bool:
        point = space.at(request.at(tokens).dims())
        return any(point.total_bytes(config) <= budget for config in whole_grid(point))

    low, high = 0, 1 << 24
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return {"model": model, "budget_gib": budget // GIB, "l_max": heuristic, "l_max_brute_force": low}


def compare_packers(model: str, tokens: int, *, chunked: bool) -> dict[str, Any]:
    """Peak over lower bound and milliseconds of first-fit, the planner, and an integer program from a cold start.

    `chunked` takes every knob at its smallest chunk instead of what the search would.
    """
    planner = Planner(model, device="rtx-3090")
    point: Point = planner.space().at(Request(seq_lens=(tokens,)).size.dims())
    first = point.choice_combinations[0]
    smallest = Config(first, tuple(point.options(first, knob)[-1] for knob in range(len(point.space.template.knobs))))
    config = smallest if chunked else search(point, planner.budget_bytes).config
    bound = point.lower_bound(config)
    found: dict[str, Any] = {"model": model, "tokens": tokens, "chunks": "smallest" if chunked else "planned"}
    place(point, config)
    for solver in ("first_fit", "auto"):
        began = time.perf_counter()
        _, peak, _ = place(point, config, solver=solver)
        found[solver] = [peak / bound, (time.perf_counter() - began) * 1e3]
    blocks = blocks_of(problem_of(point.space.variant(config), point.root_sizes(config).tolist()))
    began = time.perf_counter()
    outcome = solve_ilp(blocks, 2 * bound, timeout_s=ILP_SECONDS)
    peak = blocks.peak(outcome.offsets) if outcome.offsets is not None else 0
    found["ilp"] = [peak / bound if peak else None, (time.perf_counter() - began) * 1e3]
    return found


def _cell(measured: tuple[float | None, float]) -> str:
    ratio, milliseconds = measured
    return f"{ratio:.4f} in {milliseconds:,.2f} ms" if ratio is not None else f"none in {milliseconds:,.0f} ms"


def main() -> None:
    """Measure, record, and print the tables."""
    described = environment("ratios are computed; a time is one call's", "numpy", "pulp")
    searches = {model: compare_searches(model) for model in PRESETS}
    limits = [compare_limits(m, d, b) for m in PRESETS for d, b in (("rtx-3090", 24 * GIB), ("a100-40g", 40 * GIB))]
    cases = ((1024, True), (131072, False))
    packers = [compare_packers(model, tokens, chunked=chunked) for model in PRESETS for tokens, chunked in cases]
    result = {"environment": described, "searches": searches, "limits": limits, "packers": packers}
    write("search", result)
    print(section([result]))


def section(results: Sequence[Mapping[str, Any]]) -> str:
    """Tables of the record."""
    (result,) = results
    text = table(
        ("model", "requests", "same feasibility", "worst time / best", "evaluations", "brute force", "ms", "brute force ms"),
        [
            (m, s["requests"], s["same_feasibility"], f"{s['worst_time_ratio']:.4f}", f"{s['evaluations']:.0f}",
             f"{s['evaluations_brute_force']:.0f}", f"{s['ms']:.2f}", f"{s['ms_brute_force']:.2f}")
            for m, s in result["searches"].items()
        ],
    )  # fmt: skip
    text += "\n\n" + table(
        ("model", "budget", "L_max", "L_max, brute force"),
        [
            (x["model"], f"{x['budget_gib']} GiB", f"{x['l_max']:,}", f"{x['l_max_brute_force']:,}")
            for x in result["limits"]
        ],
    )
    text += "\n\n" + table(
        (
            "peak over lower bound",
            "tokens",
            "chunks",
            "first-fit",
            "planner (replay)",
            f"ILP, cold, {ILP_SECONDS} s at most",
        ),
        [
            (x["model"], f"{x['tokens']:,}", x["chunks"], *(_cell(x[k]) for k in ("first_fit", "auto", "ilp")))
            for x in result["packers"]
        ],
    )
    return f"{text}\n\n{source_line(result)}"


if __name__ == "__main__":
    main()
