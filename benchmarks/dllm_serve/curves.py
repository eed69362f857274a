"""Curves of dLLM-Serve's experiments: throughput and latency by the rate of arrivals (its figures 3 to 5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

__all__ = ["picture_of", "write_curves"]

PANELS: Final = {
    "tokens_per_s": "tokens/s", "latency_mean_s": "mean latency, s", "latency_p99_s": "99th percentile, s",
    "latency_deviation_s": "deviation, s",
}  # fmt: skip


def picture_of(result: Mapping[str, Any]) -> str | None:
    """Return the name of the picture that a record's points are in; None if none has a rate."""
    if not any(point.get("rate") for point in result["points"]):
        return None
    budget = result["budget_bytes"] >> 30
    return f"dllm-serve-{result['traffic']}-{result['model']}-{result['device']}-{budget}.png"


def write_curves(results: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw a picture for each model, traffic, card and budget, of all runs that served the same trace; return the files.

    Of a system's rate that several of them have measured, the last one holds; a packed loop has the colour of the published one,
    dashed.
    """
    from matplotlib.figure import Figure

    drawn = dict[str, list[Mapping[str, Any]]]()
    for result in results:
        if name := picture_of(result):
            drawn.setdefault(name, []).append(result)
    for name, runs in drawn.items():
        figure = Figure(figsize=(3.6 * len(PANELS), 4.2), dpi=150, layout="constrained")
        axes, colors = figure.subplots(1, len(PANELS)), dict[str, str]()
        for axis, (key, label) in zip(axes, PANELS.items(), strict=True):
            for system, mine in _curves(runs):
                found = [(point["rate"], point[key]) for point in mine if key in point]
                if found:
                    color = colors.setdefault(system.removesuffix("-packed"), f"C{len(colors)}")
                    style = "--" if system.endswith("-packed") else "-"
                    axis.plot(*zip(*found, strict=True), style, color=color, marker=".", linewidth=1, label=system)
            axis.set(xlabel="requests/s", ylabel=label)
            axis.set_ylim(bottom=0)
            axis.spines[["top", "right"]].set_visible(False)
        figure.legend(
            *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=7
        )
        figure.savefig(folder / name, metadata={"Software": None})
    return [folder / name for name in drawn]


def _curves(runs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Give each system of the runs, and its points with rates in order of these."""
    found = dict[str, dict[float, Mapping[str, Any]]]()
    for run in sorted(runs, key=lambda run: run["environment"]["recorded"]):
        for point in run["points"]:
            if point.get("rate"):
                found.setdefault(point["system"], {})[point["rate"]] = point
    for system, points in found.items():
        yield system, [points[rate] for rate in sorted(points)]
