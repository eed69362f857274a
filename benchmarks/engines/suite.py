"""Run a benchmark: one process per engine and way to compile, one after the other. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.bench.suite import Progress, Turn, run_turns
from benchmarks.engines.settings import SpeedSettings

__all__ = ["fastest_compiled", "run"]


def run(
    settings: SpeedSettings, *, command: str, progress: Progress | None = None, deadline_s: float | None = None
) -> dict[str, Any]:
    """Measure every engine as `benchmarks.bench.run` does, and its largest contexts, as `limits`."""
    result = run_turns(
        _turns(settings), settings, command=command, progress=progress, deadline_s=deadline_s,
        worker="benchmarks.engines.worker",
    )  # fmt: skip
    return {**result, "points": fastest_compiled(result["points"])}


def _turns(settings: SpeedSettings) -> Iterator[Turn]:
    """Every engine, and how it is compiled, if it is."""
    for engine in settings.engines:
        for way in settings.compiled if engine == "compile" else (None,):
            yield engine, _of_way(settings, way), {} if way is None else {"compiled": way}


def _of_way(settings: SpeedSettings, compiled: str | None) -> SpeedSettings:
    """The same of one way to compile. The last one alone finds the largest contexts: others compile each size that is tried."""
    if compiled is None or compiled == settings.compiled[-1]:
        return replace(settings, compiled=settings.compiled[-1:])
    return replace(settings, compiled=(compiled,), caps=() if settings.contexts else settings.caps)


def fastest_compiled(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the points, of the ways to compile the fastest at each size; its `compiled_s` has the seconds of all."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for point in points:
        place = point["engine"], point["tokens"], point["mask_ratio"]
        if "compiled" not in point:
            found[place] = dict(point)
            continue
        seconds = point.get("compiled_s", {point["compiled"]: point["step_s"]})
        best = found.get(place)
        if best is not None:
            seconds = best["compiled_s"] | seconds
        if best is None or (point["step_s"] or math.inf) < (best["step_s"] or math.inf):
            best = dict(point)
        found[place] = {**best, "compiled_s": seconds}
    return [*found.values()]
