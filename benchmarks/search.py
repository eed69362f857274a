"""The bottleneck-driven search against brute force, and first-fit against an ILP (Mosaic, figures 16 to 18)."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

from benchmarks.record import ROOT, environment, replace_section, table, write
from mosaic.models import PRESETS
from mosaic.planner import Planner, Request
from mosaic.planner.limits import max_context, smallest_total
from mosaic.planner.placement import place
from mosaic.planner.search import brute_force, search
from mosaic.planner.space import Point, Space
from mosaic.units import GIB

DEVICES = ("rtx-3090", "a100-40g", "h200")
CONTEXTS = (1024, 8192, 32768, 131072, 524288)
RATIOS = (0.1, 0.5, 0.9)
SLACKS = (0.999, 1.0, 1.01, 1.1, 1.5)


def compare_searches(model: str) -> dict[str, Any]:
    """Feasibility, time and effort of both searches over the grid."""
    rows = []
    for device in DEVICES:
        space = Planner(model, device=device).space()
        for tokens, ratio in itertools.product(CONTEXTS, RATIOS):
            dims = Request(seq_lens=(tokens,), mask_ratio=ratio).dims()
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
    planner = Planner(model, device=device, budget_bytes=budget)
    request = Request(seq_lens=(1,))
    space = planner.space()
    heuristic = max_context(space, request.dims_at, budget)

    def fits(tokens: int) -> bool:
        point = space.at(request.dims_at(tokens))
        return any(point.total_bytes(config) <= budget for config in point.grid())

    low, high = 1, 1 << 24
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return {"model": model, "device": device, "l_max": heuristic, "l_max_brute_force": low}


def compare_packers(model: str, tokens: int) -> dict[str, Any]:
    """Peak over lower bound and seconds: first-fit in program order, the planner's portfolio, CBC's ILP, CP-SAT."""
    planner = Planner(model, device="rtx-3090")
    point: Point = planner.space().at(Request(seq_lens=(tokens,)).dims())
    result = search(point, planner.budget_bytes)
    found: dict[str, Any] = {"model": model, "tokens": tokens}
    place(point, result.config)
    for solver in ("first_fit", "auto", "cpsat", "ilp"):
        began = time.perf_counter()
        _, peak, _ = place(point, result.config, solver=solver)
        found[solver] = [
            round(peak / point.lower_bound(result.config), 4),
            round((time.perf_counter() - began) * 1e3, 2),
        ]
    return found


def main() -> None:
    """Measure, record, and rewrite the tables in docs/performance.md."""
    searches = {model: compare_searches(model) for model in PRESETS}
    limits = [compare_limits(m, d, b) for m in PRESETS for d, b in (("rtx-3090", 24 * GIB), ("a100-40g", 40 * GIB))]
    packers = [compare_packers(model, tokens) for model in PRESETS for tokens in (1024, 131072)]
    env = environment("numpy", "ortools", "pulp")
    write("search", {"environment": env, "searches": searches, "limits": limits, "packers": packers})
    text = table(
        ("model", "requests", "same feasibility", "worst time / best", "evaluations", "brute force", "ms", "brute force ms"),
        [
            (m, s["requests"], s["same_feasibility"], f"{s['worst_time_ratio']:.4f}", f"{s['evaluations']:.0f}",
             f"{s['evaluations_brute_force']:.0f}", f"{s['ms']:.2f}", f"{s['ms_brute_force']:.2f}")
            for m, s in searches.items()
        ],
    )  # fmt: skip
    text += "\n\n" + table(
        ("model", "budget", "L_max", "L_max, brute force"),
        [(x["model"], x["device"], f"{x['l_max']:,}", f"{x['l_max_brute_force']:,}") for x in limits],
    )
    cell = "{0[0]:.4f} in {0[1]:g} ms".format
    text += "\n\n" + table(
        ("peak over lower bound", "tokens", "first-fit", "planner", "CP-SAT", "ILP (CBC)"),
        [
            (x["model"], f"{x['tokens']:,}", cell(x["first_fit"]), cell(x["auto"]), cell(x["cpsat"]), cell(x["ilp"]))
            for x in packers
        ],
    )
    text += f"\n\n{env['machine']}, Python {env['python']}, commit {env['commit']}, `{env['command']}`."
    replace_section(ROOT / "docs" / "performance.md", "search", text)
    print(text)


if __name__ == "__main__":
    main()
