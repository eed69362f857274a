"""Figures in sentences of README.md and docs, by name: `<!--fig NAME-->142 us<!--/fig-->` is filled by `benchmarks.report`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

from benchmarks.record import load_results
from mosaic.units import GIB

__all__ = ["FIGURES", "HEADLINE", "points_of"]

HEADLINE: Final = "llada-8b"
Result = Mapping[str, Any]


def points_of(results: Iterable[Result]) -> list[dict[str, Any]]:
    """The points of a model's last run, the largest of those: times of two runs, perhaps of two cards, are never set beside each
    other."""
    timed = (result for result in results if result["points"])
    last = max(timed, key=lambda run: (run["environment"].get("recorded", ""), len(run["points"])), default=None)
    return [] if last is None else last["points"]


def _planning(what: str) -> str:
    """A row of the table of planning times."""
    (result,) = load_results("planning")
    (row,) = (row for row in result["figures"] if row["what"].startswith(what))
    return f"{row['value']:.2g} {row['unit']}"


def _range(values: Iterable[float]) -> str:
    found = sorted(values)
    return f"{found[0]:.2f} to {found[-1]:.2f}"


def _times(engine: str) -> str:
    """Ratio of the step time of the fastest engine of a name to Mosaic's, over all points."""
    at: dict[tuple[int, float], dict[str, float]] = {}
    for point in points_of(result for result in load_results("speed") if result["model"] == HEADLINE):
        if not point["failed"]:
            at.setdefault((point["tokens"], point["mask_ratio"]), {})[point["engine"]] = point["step_s"]
    return _range(
        min(others) / steps["mosaic"]
        for steps in at.values()
        if (others := [seconds for name, seconds in steps.items() if name.startswith(engine)]) and "mosaic" in steps
    )


def _limit(engine: str) -> str:
    """An engine's largest context in 24 GiB."""
    entries = (entry for result in load_results("speed") for entry in result["limits"])
    found = {entry["engine"]: entry["max_tokens"] for entry in entries if entry["cap_bytes"] == 24 * GIB}
    return f"{found[engine]:,}"


def _executed(tokens: int, budget_gib: int) -> Result:
    """The run of a plan with the most layers, and of these the last."""
    runs = [
        (run["executed_layers"], result["environment"].get("recorded", ""), number, run)
        for number, result in enumerate(load_results("fit"))
        for run in result["runs"]
        if not run["failed"]
        and (run["name"], run["tokens"], run["budget_bytes"]) == (HEADLINE, tokens, budget_gib * GIB)
    ]
    return max(runs, key=lambda run: run[:3])[3]


def _device(tokens: int, budget_gib: int) -> str:
    return f"{_executed(tokens, budget_gib)['driver_bytes'] / GIB:.1f} GiB"


def _generation(model: str) -> str:
    """Ratio of the published loops' time to Mosaic's."""
    results = [result for result in load_results("decoding") if result["model"] == model and result["card"] != "cpu"]
    return _range(point["ratio"] for result in results for point in result["points"] if "ratio" in point)


def _policy(kind: str, schedule: str, policy: str) -> str:
    """How many more answers are exact than under exact attention, with the interval, of the most answers."""
    runs = [result for result in load_results(kind) if policy in result["schedules"].get(schedule, {})]
    largest = max((run for run in runs if run["settings"]["split"] == "judge"), key=lambda run: int(run["answers"]))
    change = largest["schedules"][schedule][policy]["groups"]["all"]["against"]["exact"]
    low, high = 100 * change["low"], 100 * change["high"]
    return f"{100 * change['difference']:+.1f} points ({low:+.1f} to {high:+.1f})"


def _decodability(preset: str) -> str:
    """Share of steps on chains that decide one of the two tokens with the largest delta."""
    for result in load_results("decodability"):
        settings = result["settings"]
        if settings["tasks"] == ["chain"] and settings["preset"] == preset:
            return f"{result['signals']['delta']['reached']:.1%}"
    raise LookupError(preset)


FIGURES: Final[Mapping[str, Callable[[], str]]] = {
    "plan-cpu": partial(_planning, "CPU time of the same"),
    "eager-limit": partial(_limit, "eager"),
    "compile-limit": partial(_limit, "compile"),
    "device-32k": partial(_device, 32_768, 4),
    "device-128k": partial(_device, 131_072, 6),
    "device-512k": partial(_device, 524_288, 12),
    "step-512k": lambda: f"{_executed(524_288, 12)['step_s']:.0f} s",
    "device-1m": partial(_device, 1_048_576, 8),
    "device-1m-24": partial(_device, 1_048_576, 24),
    "generation-llada": partial(_generation, "llada-8b"),
    "generation-sdar": partial(_generation, "sdar-8b"),
    "step-eager": partial(_times, "eager"),
    "step-compile": partial(_times, "compile"),
    "policy-mage": partial(_policy, "policies", "dynamic", "mage:ratio=1/16"),
    "policy-exact-ends": partial(_policy, "policies", "dynamic", "exact-ends:ratio=1/16"),
    "policy-focus": partial(_policy, "evictions", "dynamic:threshold=0.9", "focus+dc+"),
    "policy-focus-masked": partial(
        _policy, "evictions", "dynamic:threshold=0.9", "focus:alpha=1.2:importance=masked+dc+"
    ),
    "policy-focus-low": partial(_policy, "evictions", "dynamic:threshold=0.9", "focus:alpha=1.2+dc+"),
    "decodability-block": partial(_decodability, "focus"),
    "decodability-masked": partial(_decodability, "eviction(importance='masked')"),
}
