"""Solve families of generated instances within a limit, OmniMalloc beside it.

    python -m benchmarks.offset_families [--only perfect,jittered,layered,large] [--foreign 3]

Seeds begin at 1000; none of them was used while the solvers were written. Each answer is checked by `validate`. All of it
takes about a quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks import record
from benchmarks.offsets import HERE, omnimalloc, order_of, warm_up
from mosaic.planner.offsets import Problem, read_csv, solve, validate
from tests.offset_instances import jittered, layered, perfect, staggered, unrolled

FIRST_SEED = 1000
NEAR = 1.005  # peak over lower bound that counts as near
NAME = "offset-families"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the table: a generator, the number of seeds, and seconds for each."""

    part: str
    name: str
    make: Callable[[int], Problem]
    seeds: int
    limit_s: float


def families() -> Iterator[Family]:
    """Yield every row; shipped instances are shaken by 5 % of each size and 1.25 % of the time span."""
    for count in (100, 200, 400):
        yield Family(part="perfect", name=f"perfect, {count}", make=partial(perfect, count), seeds=30, limit_s=10.0)
    for path in sorted((HERE / "instances").glob("*.csv*"), key=order_of):
        name = path.name.split(".")[0]
        yield Family(
            part="jittered", name=f"{name}, shaken", make=partial(jittered, read_csv(path)), seeds=10, limit_s=10.0
        )
    for count, seeds, limit_s in ((500, 6, 10.0), (2_000, 6, 10.0), (20_000, 8, 30.0)):
        yield Family(
            part="layered", name=f"layered, {count:,}", make=partial(layered, count), seeds=seeds, limit_s=limit_s
        )
    resnet = read_csv(HERE / "instances" / "somas_resnet50.csv")
    for name, grow in (("overlapping", staggered), ("nested", unrolled)):
        make = partial(grown, grow, resnet)
        yield Family(part="large", name=f"18 {name} steps of somas_resnet50", make=make, seeds=3, limit_s=30.0)


def grown(grow: Callable[[Problem, int, int], Problem], problem: Problem, seed: int) -> Problem:
    """Return 18 copies."""
    return grow(problem, 18, seed)


def main() -> None:
    """Run, write the results, print the table; of some families, print alone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="parts to run, separated by commas")
    parser.add_argument("--foreign", type=int, default=3, help="instances of each row that OmniMalloc gets")
    arguments = parser.parse_args()
    packages = ["numpy", *(name for name in ("numba", "omnimalloc") if find_spec(name))]
    described = record.environment("one run of each instance", *packages, data=(HERE / "instances").iterdir())
    warm_up(("auto",))
    parts = set(filter(None, arguments.only.split(",")))
    document: dict[str, Any] = {"environment": described, "first_seed": FIRST_SEED, "rows": []}
    for family in families():
        if not parts or family.part in parts:
            document["rows"].append(measure(family, arguments.foreign))
            print(json.dumps(document["rows"][-1]), file=sys.stderr)
    if not parts:
        record.write(NAME, document)
    print(section([document]))


def measure(family: Family, foreign: int) -> dict[str, Any]:
    """Return the row of one family: ratios and seconds of ours and of OmniMalloc's on the first few."""
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    for seed in range(FIRST_SEED, FIRST_SEED + family.seeds):
        problem = family.make(seed)
        began = time.perf_counter()
        solution = solve(problem, timeout_s=family.limit_s)
        seconds = time.perf_counter() - began
        violations = validate(problem, solution)
        assert not violations, violations
        bound = solution.lower_bound_bytes
        ours.append({"ratio": solution.peak_bytes / bound, "optimal": solution.optimal, "seconds": round(seconds, 3)})
        if len(theirs) < foreign and (other := omnimalloc(problem)):
            ratio = other["peak_bytes"] / bound
            theirs.append({"ratio": ratio, "optimal": ratio == 1, "seconds": other["seconds"]})
    return {"name": family.name, "part": family.part, "limit_s": family.limit_s, "ours": ours, "omnimalloc": theirs}


def section(results: Sequence[Mapping[str, Any]]) -> str:
    """Table of the record."""
    (document,) = results
    head = ["family", "limit", "optimal", f"within {NEAR}", "worst", "median time", "longest"]
    head += ["OmniMalloc: optimal", f"within {NEAR}", "worst", "median time"]
    lines = [
        [row["name"], f"{row['limit_s']:g} s", *cells(row["ours"]), *cells(row["omnimalloc"])[:4]]
        for row in document["rows"]
    ]
    note = f"Seeds from {document['first_seed']}; ratios are peak over lower bound."
    return f"{record.table(head, lines)}\n\n{record.source_line(document)} {note}"


def cells(results: list[dict[str, Any]]) -> list[str]:
    """Return counts, the worst ratio, the median and the longest time."""
    if not results:
        return ["-"] * 5
    seconds = [result["seconds"] for result in results]
    optimal, near = (sum(test(r) for r in results) for test in (lambda r: r["optimal"], lambda r: r["ratio"] <= NEAR))
    worst = max(result["ratio"] for result in results)
    counts = [f"{count} of {len(results)}" for count in (optimal, near)]
    return [*counts, f"{worst:.4f}", f"{statistics.median(seconds):.2f} s", f"{max(seconds):.2f} s"]


if __name__ == "__main__":
    main()
