"""How long planning takes: whole processes with a warm cache, and in memory once the template is compiled."""

from __future__ import annotations

import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import sources
from benchmarks.record import environment, median_seconds, source_line, table, write
from mosaic.models.step import MAX_TOKENS
from mosaic.planner import Planner, Request
from mosaic.planner.check import check_plan
from mosaic.planner.limits import max_context
from mosaic.planner.offsets import Problem, solve
from mosaic.planner.placement import place
from mosaic.planner.planner import plan_point
from mosaic.planner.search import search

TOKENS = 131072
METHOD = "medians: of 9 processes and calls after one that is not counted, and of 200 plans in memory"


def process_cpu_seconds(*arguments: str, repeats: int = 9) -> float:
    """Median CPU time of a whole Python process."""
    found = []
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(found)


def process_seconds(*arguments: str, repeats: int = 9) -> float:
    """Median wall time of a whole Python process."""
    return median_seconds(
        lambda: subprocess.run([sys.executable, *arguments], capture_output=True, check=True), repeats
    )


def in_memory(repeats: int = 200) -> dict[str, float]:
    """Milliseconds of the parts of one plan; every repeat plans another context, so that nothing is remembered."""
    planner = Planner("llada-8b", device="rtx-3090")
    planner.plan(Request(seq_lens=(TOKENS,)))
    parts: dict[str, list[float]] = {
        "instantiate, search, offsets, proof": [],
        "search": [],
        "offsets": [],
        "check": [],
        "largest context": [],
    }
    identity = {"model": "llada-8b", "dtype": "bfloat16"}
    for i in range(repeats):
        request = Request(seq_lens=(TOKENS - 7 * i,))
        began = time.perf_counter()
        made = plan_point(planner.space().at(request.size.dims()), planner.budget_bytes, identity=identity)
        parts["instantiate, search, offsets, proof"].append(time.perf_counter() - began)
        document = made.document
        began = time.perf_counter()
        assert check_plan(document) == []
        parts["check"].append(time.perf_counter() - began)
        point = planner.space().at(request.size.dims())
        began = time.perf_counter()
        result = search(point, planner.budget_bytes)
        parts["search"].append(time.perf_counter() - began)
        began = time.perf_counter()
        place(point, result.config)
        parts["offsets"].append(time.perf_counter() - began)
        began = time.perf_counter()
        max_context(
            planner.space(), lambda context, asked=request: asked.at(context).dims(), planner.budget_bytes, limit=MAX_TOKENS,
            host_budget_bytes=planner.host_budget_bytes,
        )  # fmt: skip
        parts["largest context"].append(time.perf_counter() - began)
    return {name: sorted(times)[len(times) // 2] * 1e3 for name, times in parts.items()}


def formula_microseconds(repeats: int = 20000) -> float:
    """Microseconds of one evaluation of LLaDA-8B's peak formula."""
    point = Planner("llada-8b", device="rtx-3090").space().at(Request(seq_lens=(TOKENS,)).size.dims())
    config = point.config({"attention": "queries", "proj": 256, "ffn": 2048, "logits": 512})
    variant = point.space.variant(config)
    values = point.values(config)
    began = time.perf_counter()
    for _ in range(repeats):
        max(variant.formula.values(variant.body.monomials(values)).tolist())
    return (time.perf_counter() - began) / repeats * 1e6


def transformer_trace(layers: int, per_layer: int = 17) -> Problem:
    """A transformer-like trace: short chains in every layer, two residual segments."""
    rng = random.Random(0)
    sizes, starts, ends = [], [], []
    for layer in range(layers):
        base = layer * per_layer
        for i in range(per_layer):
            sizes.append(512 * rng.choice((16, 64, 64, 192, 2048, 2048, 6144)))
            starts.append(base + i)
            ends.append(base + i + rng.choice((1, 2, 2, 3, 5)) + (per_layer if i == 0 else 0))
    return Problem(sizes=sizes, starts=starts, ends=ends, alignments=512)


def measure() -> dict[str, Any]:
    """Everything, with the target each figure is held against."""
    described = environment(METHOD, "numpy", "sympy", "typer", "rich")
    plan = ("-m", "mosaic", "plan", "--model", "llada-8b", "--ctx", "128k", "--device", "rtx-3090")
    sources.also(sources.loaded_by(*plan[1:]))
    large = transformer_trace(295)
    empty = process_seconds("-c", "pass")
    imported = process_seconds("-c", "import mosaic")
    first_fit = median_seconds(lambda: solve(large, solver="first_fit"), 9) * 1e3
    figures: dict[str, tuple[float, str, float | None]] = {
        "`mosaic plan` LLaDA-8B at 128K, whole process": (process_seconds(*plan), "s", 0.7),
        "CPU time of the same": (process_cpu_seconds(*plan), "s", None),
        "`import mosaic` beyond an empty interpreter": ((imported - empty) * 1e3, "ms", 50),
        "one evaluation of the peak formula": (formula_microseconds(), "µs", 20),
        f"first-fit, {len(large.sizes):,} buffers": (first_fit, "ms", 50),
    }
    memory = in_memory()
    figures["instantiate, search, offsets and proof in memory"] = (
        memory.pop("instantiate, search, offsets, proof"),
        "ms",
        5,
    )
    return {
        "environment": described,
        "figures": [{"what": k, "value": round(v, 3), "unit": u, "target": t} for k, (v, u, t) in figures.items()],
        "parts_ms": {name: round(value, 3) for name, value in memory.items()},
    }


def main() -> None:
    """Measure, record, and print the table."""
    result = measure()
    write("planning", result)
    print(section([result]))


def section(results: Sequence[Mapping[str, Any]]) -> str:
    """Table of the record."""
    (result,) = results
    targets = [f"{f['target']:g} {f['unit']}" if f["target"] else "" for f in result["figures"]]
    rows = [(f["what"], f"{f['value']:g} {f['unit']}", t) for f, t in zip(result["figures"], targets, strict=True)]
    return f"{table(('', 'measured', 'target'), rows)}\n\n{source_line(result)}"


if __name__ == "__main__":
    main()
