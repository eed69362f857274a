"""Measure every offset solver on the public instances.

    python -m benchmarks.offsets [--timeout 10] [--only A,J] [--solvers auto,skyline]

Each answer is checked by `validate`. Times are wall seconds in a warm process: compiled code is on disk and loaded
before the clock starts. OmniMalloc is measured in the same run where it is installed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import record
from mosaic.planner.offsets import Problem, Solution, blocks_of, read_csv, solve, validate

HERE = Path(__file__).parent

ONE_PASS = ("first_fit", "best_fit", "greedy_by_size", "skyline")
SEARCHING = ("local_search", "cpsat")
LARGE = 6_000  # buffers; above, only one-pass solvers and the portfolio run

# Measured earlier by us on 2 cores, not in this run. MiniMalloc (C++, single thread, default round robin): seconds to
# reach the capacity 1,048,576 (for the others: the lower bound given as capacity). OmniMalloc 1.0.0, supermalloc with
# its default threads: peak over lower bound after its 3 s.
EARLIER: dict[str, tuple[str, str]] = {
    "A": ("4.67 s", "1.034"), "C": ("0.69 s", "1.164"), "F": ("4.74 s", "1.147"), "H": ("1.38 s", "1.078"),
    "J": ("1.17 s", "1.110"), "somas_resnet50": ("0.30 s", "1.003"), "iopddl_G_1": ("1.8 s", "1.000"),
    "iop_B_max": ("-", "1.000"), "iop_L_max": ("-", "1.016"),
}  # fmt: skip


def main() -> None:
    """Run, write the results, print the table; of some instances or solvers, print alone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds for each searching solver")
    parser.add_argument("--only", default="", help="names of instances, separated by commas")
    parser.add_argument("--solvers", default="", help="names of solvers, separated by commas")
    arguments = parser.parse_args()
    packages = ["numpy", *(name for name in ("numba", "ortools", "omnimalloc") if find_spec(name))]
    described = record.environment("single runs", *packages, data=(HERE / "instances").iterdir())
    chosen = tuple(filter(None, arguments.solvers.split(","))) or (*ONE_PASS, *SEARCHING, "auto")
    warm_up(chosen)
    names = set(filter(None, arguments.only.split(",")))
    rows = []
    for path in sorted((HERE / "instances").glob("*.csv*"), key=order_of):
        if not names or path.name.split(".")[0] in names:
            rows.append(measure(path, chosen, arguments.timeout))
    document = {"environment": described, "timeout_s": arguments.timeout, "instances": rows}
    if not names and not arguments.solvers:
        record.write("offsets", document)
    print(section([document]))


def order_of(path: Path) -> tuple[bool, str]:
    """Sort the lettered instances first."""
    return len(path.name.split(".")[0]) > 1, path.name


def warm_up(solvers: tuple[str, ...]) -> None:
    """Load compiled code and packages before any clock starts."""
    problem = read_csv(HERE / "instances" / "A.1048576.csv")
    for solver in solvers:
        solve(problem, solver=solver, timeout_s=1.0)


def measure(path: Path, solvers: tuple[str, ...], timeout_s: float) -> dict[str, Any]:
    """Return the row of one instance."""
    problem = read_csv(path)
    name = path.name.split(".")[0]
    blocks = blocks_of(problem)
    row: dict[str, Any] = {
        "instance": name,
        "buffers": len(problem),
        "lower_bound_bytes": blocks.lower_bound,
        "capacity": problem.capacity,
        "solvers": {},
    }
    for solver in solvers:
        if len(problem) > LARGE and solver in ("skyline", *SEARCHING):
            continue
        limit = timeout_s if solver in (*SEARCHING, "auto") else None
        row["solvers"][solver] = timed(problem, lambda s=solver, t=limit: solve(problem, solver=s, timeout_s=t))  # type: ignore[misc]
        print(name, solver, row["solvers"][solver], file=sys.stderr)
    if foreign := omnimalloc(problem):
        row["solvers"]["omnimalloc"] = foreign
        print(name, "omnimalloc", foreign, file=sys.stderr)
    return row


def timed(problem: Problem, run: Callable[[], Solution]) -> dict[str, Any]:
    """Return peak, seconds and certificates of one run, after checking the answer."""
    began = time.perf_counter()
    solution = run()
    seconds = time.perf_counter() - began
    violations = validate(problem, solution)
    assert not violations, violations
    within = [at for at, peak in solution.history if problem.capacity is not None and peak <= problem.capacity]
    return {
        "peak_bytes": solution.peak_bytes,
        "optimal": solution.optimal,
        "capacity_reached": solution.capacity_reached if problem.capacity is not None else None,
        "seconds": round(seconds, 4),
        "seconds_to_best": round(solution.history[-1][0], 4) if solution.seconds else None,
        "seconds_to_capacity": round(within[0], 4) if within and solution.seconds else None,
        "found_by": solution.solver,
    }


def omnimalloc(problem: Problem) -> dict[str, Any] | None:
    """Return OmniMalloc's answer with its defaults, or None where it is not installed."""
    try:
        import omnimalloc as om
    except ImportError:
        return None
    try:
        columns = zip(problem.ids, problem.sizes, problem.starts, problem.ends, strict=True)
        allocations = [om.Allocation(id=i, size=s, start=a, end=b) for i, s, a, b in columns]
        began = time.perf_counter()
        pool = om.allocate(om.Pool(id="pool", allocations=tuple(allocations)), "supermalloc")
        seconds = time.perf_counter() - began
        peak = max((allocation.offset or 0) + allocation.size for allocation in pool.allocations)
    except Exception as error:  # a foreign package's interface may change: say so rather than stop
        print(f"omnimalloc: {error!r}", file=sys.stderr)
        return None
    return {"peak_bytes": int(peak), "seconds": round(seconds, 4)}


def section(results: Sequence[Mapping[str, Any]]) -> str:
    """Table of the record."""
    (document,) = results
    solvers = [
        name for name in (*ONE_PASS, *SEARCHING, "auto") if any(name in r["solvers"] for r in document["instances"])
    ]
    head = ["instance", "buffers", "lower bound", "capacity / LB", *solvers, "auto: to capacity", "auto: to its best"]
    head += ["OmniMalloc, this run", "OmniMalloc, earlier", "MiniMalloc, earlier"]
    lines: list[list[object]] = []
    for row in document["instances"]:
        bound, capacity, found = row["lower_bound_bytes"], row["capacity"], row["solvers"]
        cells = [row["instance"], f"{row['buffers']:,}", f"{bound:,}", f"{capacity / bound:.4f}" if capacity else "-"]
        cells += [cell(found.get(solver), bound) for solver in solvers]
        auto = found.get("auto", {})
        cells += [seconds(auto.get("seconds_to_capacity")), seconds(auto.get("seconds_to_best"))]
        cells.append(cell(found.get("omnimalloc"), bound))
        minimalloc, omni = EARLIER.get(row["instance"], ("-", "-"))
        lines.append([*cells, omni, minimalloc])
    limit = f"{document['timeout_s']:g} s for each searching solver."
    return f"{record.table(head, lines)}\n\n{record.source_line(document)} {limit}"


def cell(result: dict[str, Any] | None, bound: int) -> str:
    """Return "ratio, time"; bold at the lower bound."""
    if result is None:
        return "-"
    ratio = f"{result['peak_bytes'] / bound:.4f}"
    return f"{f'**{ratio}**' if result['peak_bytes'] == bound else ratio}, {seconds(result['seconds'])}"


def seconds(value: float | None) -> str:
    """Return a time in ms below a tenth of a second, else in s."""
    if value is None:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 0.1 else f"{value:.2f} s"


if __name__ == "__main__":
    main()
