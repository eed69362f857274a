"""Points: a system serves the requests of a trace for some seconds, queued or as they come."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from benchmarks.bench.meters import synchronise
from benchmarks.dllm_serve.baselines import System
from benchmarks.dllm_serve.trace import Asked
from benchmarks.served import percentiles
from benchmarks.traffic import prompt_of
from mosaic.models.architecture import Architecture

__all__ = ["QUEUED", "driven"]

QUEUED: Final = math.inf
"""A rate at which requests always wait."""
BACKLOG: Final = 256
"""Requests that wait at most, queued."""


def driven(
    system: System, trace: Iterator[Asked], arch: Architecture, *, rate: float, seconds: float, cuda: bool
) -> dict[str, Any]:
    """Serve requests that come `rate` a second on average, and return figures.

    Latencies are of the requests that have come in the first half of the time, so that all have had as long to end as that; one
    that has not ended counts with its age.
    """
    before, came, ended, busy_s, steps = system.decided, dict[int, float](), dict[int, float](), 0.0, 0
    coming, began = next(trace), time.perf_counter()
    while (now := time.perf_counter() - began) < seconds:
        while coming.at_s / rate <= now and (rate != QUEUED or len(came) - len(ended) < BACKLOG):
            generator = torch.Generator().manual_seed(coming.number)
            system.submit(coming, prompt_of(arch, coming.prompt, generator))
            came[coming.number] = coming.at_s / rate
            coming = next(trace)
        if not system.is_busy:
            time.sleep(max(min(coming.at_s / rate, seconds) - now, 0.0))
            continue
        found = system.step()
        synchronise(cuda and system.asynchronous)
        after = time.perf_counter() - began
        busy_s, steps = busy_s + after - now, steps + 1
        ended |= {asked.number: after for asked, _ in found}
    tokens, took_s = system.decided - before, time.perf_counter() - began
    figures = {
        "rate": None if rate == QUEUED else rate, "seconds": took_s, "busy_s": busy_s, "steps": steps, "tokens": tokens,
        "tokens_per_s": tokens / took_s, "came": len(came), "ended": len(ended),
    }  # fmt: skip
    return figures if rate == QUEUED else figures | _latencies(came, ended, took_s)


def _latencies(came: Mapping[int, float], ended: Mapping[int, float], seconds: float) -> dict[str, Any]:
    early = {number: at for number, at in came.items() if at <= seconds / 2}
    found = [ended.get(number, seconds) - at for number, at in early.items()]
    if not found:
        return {"counted": 0, "unended": 0}
    return {
        "counted": len(found), "unended": len(early.keys() - ended.keys()), "latency_mean_s": statistics.fmean(found),
        "latency_deviation_s": statistics.pstdev(found),
        "latency_span_s": max(found) - min(found),
        **{name.replace("_ms", "_s"): value for name, value in percentiles(found, "latency_").items()},
    }  # fmt: skip
