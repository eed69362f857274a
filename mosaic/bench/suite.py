"""Run a benchmark: one process per engine, one after the other, and put their records together. No torch here."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TextIO

from mosaic.bench.environment import environment, idle_device_bytes
from mosaic.bench.settings import SCHEMA, Settings

__all__ = ["Progress", "fastest_compiled", "run", "run_engine"]

Progress = Callable[[dict[str, Any]], None]


def run(
    settings: Settings, *, command: str, progress: Progress | None = None, deadline_s: float | None = None
) -> dict[str, Any]:
    """Measure every engine.

    Parameters
    ----------
    command
        How this was asked for, for the record.
    progress
        Called with every record as it comes.
    deadline_s
        Seconds after which the engine at work is ended and the rest left out; what was measured is kept.

    Returns
    -------
    dict
        `schema`, `environment`, `settings`, `engines`, `points`, `limits`, `failures`; `complete` is False where an
        engine failed or time ran out.
    """
    ends = None if deadline_s is None else time.monotonic() + deadline_s
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "environment": {**environment(command), "idle_device_bytes": idle_device_bytes()},
        "settings": json.loads(settings.to_json()),
        "engines": [],
        "points": [],
        "limits": [],
        "failures": [],
    }
    for engine, way in _turns(settings):

        def keep(record: dict[str, Any], way: dict[str, str] = way) -> None:
            record |= way
            _keep(result, record)
            if progress is not None:
                progress(record)

        left = None if ends is None else ends - time.monotonic()
        failure = run_engine(engine, _of_way(settings, **way), keep, timeout_s=left)
        if failure is not None:
            keep({"record": "failure", "engine": engine, "message": failure})
    result["points"] = fastest_compiled(result["points"])
    _compare(result["points"])
    cards = [entry.pop("card") for entry in result["engines"]]
    result["card"] = cards[0] if cards else None
    result["complete"] = not result["failures"]
    return result


def _turns(settings: Settings) -> Iterator[tuple[str, dict[str, str]]]:
    """Every engine that runs, and how it is compiled, if it is."""
    for engine in settings.engines:
        yield from [(engine, {"compiled": way}) for way in settings.compiled] if engine == "compile" else [(engine, {})]


def _of_way(settings: Settings, compiled: str | None = None) -> Settings:
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


def run_engine(engine: str, settings: Settings, keep: Progress, *, timeout_s: float | None = None) -> str | None:
    """Run one engine's process to its end or for `timeout_s`; return why it failed, if it did."""
    if timeout_s is not None and timeout_s <= 0:
        return "not started: no time left"
    command = [sys.executable, "-m", "mosaic.bench.worker", engine]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        expired = threading.Event()

        def end() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(timeout_s if timeout_s is not None else threading.TIMEOUT_MAX, end)
        timer.daemon = True
        timer.start()
        try:
            _hand_over(settings, process)
            for line in process.stdout or ():
                keep(json.loads(line))
            code = process.wait()
        except BaseException:
            process.kill()
            raise
        finally:
            timer.cancel()
        if expired.is_set():
            return f"ended after {timeout_s:.0f} s: no time left"
        return None if code == 0 else f"{_cause(errors)} (exit code {code})"


def _hand_over(settings: Settings, process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    try:
        with process.stdin as pipe:
            pipe.write(settings.to_json())
    except BrokenPipeError:  # it ended at once; its exit code and last words say why
        pass


def _cause(errors: TextIO) -> str:
    """The last thing a process said."""
    errors.seek(0)
    lines = [line.strip() for line in errors.read().splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def _keep(result: dict[str, Any], record: dict[str, Any]) -> None:
    """File a record under its kind; which files a process loaded is not kept."""
    kind = record.pop("record")
    if kind != "process":
        result[f"{kind}s"].append(record)


def _compare(points: list[dict[str, Any]]) -> None:
    """Say for every point which share of its first predictions is eager PyTorch's."""
    eager = {(p["tokens"], p["mask_ratio"]): p.get("sample") for p in points if p["engine"] == "eager"}
    for point in points:
        mine, other = point.get("sample"), eager.get((point["tokens"], point["mask_ratio"]))
        if mine and other and point["engine"] != "eager":
            same = sum(a == b for a, b in zip(mine["tokens"], other["tokens"], strict=True))
            point["agrees_with_eager"] = same / len(other["tokens"])
