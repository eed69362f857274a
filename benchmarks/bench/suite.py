"""Run a benchmark: one process per engine, one after the other, and put their records together. No torch here."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TextIO

from benchmarks.bench.environment import environment
from benchmarks.bench.settings import Settings

__all__ = ["Progress", "Turn", "run", "run_engine", "run_turns"]

SCHEMA: Final = "mosaic.bench/1"
Progress = Callable[[dict[str, Any]], None]
Turn = tuple[str, Settings, Mapping[str, str]]


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
        `schema`, `environment`, `settings`, `engines`, `points`, `failures`; `complete` is False where an engine failed or time
        ran out.
    """
    turns: list[Turn] = [(engine, settings, {}) for engine in settings.engines]
    return run_turns(turns, settings, command=command, progress=progress, deadline_s=deadline_s)


def run_turns(
    turns: Iterable[Turn],
    settings: Settings,
    *,
    command: str,
    progress: Progress | None = None,
    deadline_s: float | None = None,
    worker: str = "benchmarks.bench.worker",
) -> dict[str, Any]:
    """Measure as `run` does, in other turns.

    Parameters
    ----------
    turns
        Engines, what each measures, and what is added to all of its records.
    worker
        The module whose process measures one turn.
    """
    ends = None if deadline_s is None else time.monotonic() + deadline_s
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "environment": environment(command),
        "settings": json.loads(settings.to_json()),
        **{kind: [] for kind in ("engines", "points", "limits", "failures")},
    }
    for engine, asked, more in turns:

        def keep(record: dict[str, Any], more: Mapping[str, str] = more) -> None:
            record |= more
            kind = record.pop("record")
            if kind != "process":  # which files it loaded is for `progress` alone
                result[f"{kind}s"].append(record)
            if progress is not None:
                progress(record)

        left = None if ends is None else ends - time.monotonic()
        failure = run_engine(engine, asked, keep, timeout_s=left, worker=worker)
        if failure is not None:
            keep({"record": "failure", "engine": engine, "message": failure})
    _compare(result["points"])
    cards = [entry.pop("card") for entry in result["engines"]]
    result["card"] = cards[0] if cards else None
    result["complete"] = not result["failures"]
    return result


def run_engine(
    engine: str,
    settings: Settings,
    keep: Progress,
    *,
    timeout_s: float | None = None,
    worker: str = "benchmarks.bench.worker",
) -> str | None:
    """Run one engine's process to its end or for `timeout_s`; return why it failed, if it did."""
    if timeout_s is not None and timeout_s <= 0:
        return "not started: no time left"
    command = [sys.executable, "-m", worker, engine]
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


def _compare(points: list[dict[str, Any]]) -> None:
    """Say for every point which share of its first predictions is eager PyTorch's."""
    eager = {(p["tokens"], p["mask_ratio"]): p.get("sample") for p in points if p["engine"] == "eager"}
    for point in points:
        mine, other = point.get("sample"), eager.get((point["tokens"], point["mask_ratio"]))
        if mine and other and point["engine"] != "eager":
            same = sum(a == b for a, b in zip(mine["tokens"], other["tokens"], strict=True))
            point["agrees_with_eager"] = same / len(other["tokens"])
