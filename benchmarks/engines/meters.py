"""Meters: a call that is repeated until the card's clock settles, and the average bytes in PyTorch's allocator."""

from __future__ import annotations

import json
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.bench.meters import synchronise

__all__ = ["Alive", "alive_over_time", "profiled", "sustained"]

_LAUNCHES: Final = ("cuda_runtime", "cuda_driver")
_WORK: Final = ("kernel", "gpu_memcpy", "gpu_memset")
Alive = tuple[int, float]
"""Largest bytes alive, and their average over time."""


def sustained(call: Callable[[], object], *, cuda: bool, least_s: float = 0.1) -> float:
    """Return the mean seconds of a call that is repeated without a pause for at least `least_s`.

    A burst would be faster than a card can go on, and a wait after every call would count the launch.
    """
    call()
    synchronise(cuda)
    count = 1
    while True:
        began = time.perf_counter()
        for _ in range(count):
            call()
        synchronise(cuda)
        took = time.perf_counter() - began
        if took >= least_s:
            return took / count
        count = max(2 * count, int(1.2 * count * least_s / max(took, 1e-6)))


def profiled(step: Callable[[], object], *, cuda: bool) -> dict[str, Any]:
    """Run a step under PyTorch's profiler with memory events; give its trace."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        step()
        synchronise(cuda)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return trace


def alive_over_time(trace: Mapping[str, Any], *, cuda: bool) -> Alive | None:
    """Return the peak and time-weighted average of the bytes that a step's allocations held.

    The allocator's events carry the host's time, while the host runs ahead of the card: on CUDA each event is placed at
    the end of the work that had been launched before it, which is when stream order makes the memory available.

    Returns
    -------
    tuple or None
        None where the trace has no work of the card, or nothing was allocated.
    """
    events = [event for event in trace["traceEvents"] if isinstance(event.get("ts"), (int, float))]
    wanted = 1 if cuda else 0  # the allocator's device: CUDA or CPU
    memory = [
        (float(event["ts"]), int(event["args"]["Bytes"]))
        for event in events
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == wanted
    ]
    memory.sort(key=lambda event: event[0])
    if not memory:
        return None
    if not cuda:
        return _weighted(memory, max(float(e["ts"]) + float(e["dur"]) for e in events if e.get("cat") == "cpu_op"))
    work = _work_of(events)
    if not work:
        return None
    launched = [at for at, _, _ in work]
    placed = []
    for at, size in memory:
        before = bisect_right(launched, at)
        placed.append((work[before - 1][2] if before else work[0][1], size))
    return _weighted(placed, work[-1][2])


def _work_of(events: Iterable[Mapping[str, Any]]) -> list[tuple[float, float, float]]:
    """(launched on the host, began, everything so far ended) of the card's work, in order of launch."""
    launched, found = {}, []
    for event in events:
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {}):
            launched[event["args"]["correlation"]] = float(event["ts"])
        elif event.get("cat") in _WORK:
            began = float(event["ts"])
            found.append((event["args"]["correlation"], began, began + float(event["dur"])))
    ordered = sorted((launched[key], began, ended) for key, began, ended in found if key in launched)
    latest, work = 0.0, []
    for at, began, ended in ordered:
        latest = max(latest, ended)
        work.append((at, began, latest))
    return work


def _weighted(events: list[tuple[float, int]], finish: float) -> Alive | None:
    """Peak and average of a sum of steps, from the first event to `finish`."""
    alive, peak, area = 0, 0, 0.0
    start = at = events[0][0]
    for time_us, size in events:
        area += alive * (time_us - at)
        at, alive = time_us, alive + size
        peak = max(peak, alive)
    area += alive * max(finish - at, 0.0)
    span = max(finish, at) - start
    return (peak, area / span) if span > 0 else None
