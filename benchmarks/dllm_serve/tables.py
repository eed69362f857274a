"""The table of dLLM-Serve's experiments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from benchmarks.dllm_serve.curves import picture_of
from benchmarks.record import source_line, table
from mosaic.units import format_bytes

__all__ = ["HEADER", "rows_of", "section"]

HEADER: Final = (
    "system", "requests a batch", "requests/s", "tokens/s", "of the best loop as published", "came, ended", "a step, ms",
    "latency, s: mean, deviation, 99th, most", "counted, of these not ended", "floor / busy", "peak",
)  # fmt: skip
PUBLISHED: Final = ("fast-dllm", "dllm-cache", "sparse-dllm", "dllm-serve")
LATENCIES: Final = tuple(f"latency_{name}_s" for name in ("mean", "deviation", "p99", "most"))


def best_published(result: Mapping[str, Any]) -> float | None:
    """Return the most tokens per second of a loop as published, queued."""
    found = [
        point["tokens_per_s"]
        for point in result["points"]
        if not point["failed"] and point["rate"] is None and point["system"] in PUBLISHED
    ]
    return max(found, default=None)


def rows_of(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows for a table, one a point."""
    best = best_published(result)
    for point in result["points"]:
        name = f"`{point['system']}`"
        if point["failed"]:
            yield [name, point["failed"].split(". ")[0], *[""] * (len(HEADER) - 2)]
            continue
        queued = f"queued: {point['tokens_per_s'] / result['trace']['mean_answer']:.2f}"
        latencies = [f"{point[key]:,.1f}" for key in LATENCIES if key in point]
        yield [
            name, f"{point['units'] or ''}",
            queued if point["rate"] is None else f"{point['rate']:g}",
            f"{point['tokens_per_s']:,.0f}", f"{point['tokens_per_s'] / best:.2f}" if best and point["rate"] is None else "",
            f"{point['came']}, {point['ended']}", f"{1e3 * point['busy_s'] / max(point['steps'], 1):.1f}",
            ", ".join(latencies), f"{point['counted']}, {point['unended']}" if "counted" in point else "",
            f"{point['floor_s'] / point['busy_s']:.2f}" if "floor_s" in point else "",
            format_bytes(point["peak_bytes"]) if "peak_bytes" in point else "",
        ]  # fmt: skip


def section(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a table per record, behind the first of a picture's records the picture."""
    parts, shown = [], set[str]()
    for r in results:
        title = f"{r['model']}, {r['traffic']}-like traffic, {format_bytes(r['budget_bytes'])}"
        parts += [f"**{title}**", table(HEADER, [*rows_of(r)]), source_line(dict(r))]
        if (picture := picture_of(r)) and picture not in shown:
            shown.add(picture)
            parts.append(f"![Throughput and latencies by the rate of requests: {title}](images/{picture})")
    return "\n\n".join(parts)
