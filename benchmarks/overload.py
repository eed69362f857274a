"""Sessions with more traffic than they have room for: their memory, and what small logits and the scheduler gain."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, Final

from benchmarks.bench.meters import driver_bytes
from benchmarks.eviction import NewSizes
from benchmarks.served import TIMES, Meter, percentiles, shown_times
from benchmarks.traffic import Arrival, Traffic, drawn, kinds_of, longest_of, poisson, served
from mosaic.decoding import Session
from mosaic.errors import MosaicError
from mosaic.runtime.compiled import CompiledModel
from mosaic.units import GIB, format_bytes

__all__ = ["ABLATION", "LOOKED", "MEMORY", "VARIANTS", "ablated", "ablation_row", "memory_row", "overloaded"]

CANCELLED: Final = 0.01
"""How often a step is followed by the cancellation of a request."""
BETWEEN: Final = 8
"""Requests that are submitted between two steps, at most."""
LOOKED: Final = 16
"""Steps from one look at the driver's counter to the next."""
MOST_FAILURES: Final = 8
_UNBOUNDED: Final = {"max_num_batched_tokens": 1 << 20, "max_delay_ms": math.inf}
VARIANTS: Final[Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]] = {
    "all": ({}, {}), "whole logits": ({"config": {}}, {}), "no scheduler": ({}, _UNBOUNDED),
    "neither": ({"config": {}}, _UNBOUNDED),
}  # fmt: skip
"""Options of `compile` and of the session. Without the scheduler, all prompts and refreshes that wait come in one step."""


def overloaded(
    model: CompiledModel, seconds: float, *, seed: int, tabled: bool = True, warm: int = 0, **traffic: Any
) -> dict[str, Any]:
    """Serve random requests, of which some always wait, for a time; now and then one is cancelled.

    Parameters
    ----------
    warm
        Steps are planned and captured for so many requests before the time begins; 0: as they come.

    Returns
    -------
    dict
        With the largest use of the device by the driver's counter, or on a CPU of mapped pages, how often pages were mapped or
        given back in the whole time and in its last half, how requests ended, what was raised, and rows of states that are left
        when the session is closed.
    """
    rng = random.Random(seed)
    draws = drawn(model.architecture, seed, **traffic)
    most, maps, failures = _used_bytes(model), list[float](), list[str]()
    with Session(Meter(model, tabled=tabled)) as session:
        if warm and tabled:
            session.warm(kinds_of(model.architecture, islice(draws, 256)), requests=warm, tokens=longest_of(traffic))
        new = NewSizes(model)
        run = Traffic(session, (Arrival(0.0, submission) for submission in draws), between=BETWEEN)
        pages = model.workspace.committed_bytes()
        while run.seconds < seconds and len(failures) < MOST_FAILURES:
            try:
                run.step()
            except MosaicError as error:
                failures.append(f"{type(error).__name__}: {error}")
            if session.live and rng.random() < CANCELLED:
                session.cancel(rng.choice(session.live))
            if pages != (pages := model.workspace.committed_bytes()):
                maps.append(run.seconds)
            if len(run.steps_ms) % LOOKED == 0:
                most = max(most, _used_bytes(model))
        total = run.seconds
    return {
        "seconds": total, "steps": len(run.steps_ms), **percentiles(run.steps_ms), "most_live": run.most_live,
        "tokens_per_s": sum(map(len, run.answers.values())) / total, "finishes": dict(Counter(run.finishes)),
        "refused": len(run.refused), "failures": failures, "budget_bytes": model.memory().budget_bytes, "most_bytes": most,
        "maps": len(maps), "late_maps": sum(at > total / 2 for at in maps), "rows_left": sum(model.state_rows.values()),
        "new_sizes": new.count(),
    }  # fmt: skip


def _used_bytes(model: CompiledModel) -> int:
    return driver_bytes(model.asynchronous) or sum(model.memory().committed.values())


def ablated(
    compiled: Callable[..., AbstractContextManager[CompiledModel]], requests: int, *, seed: int, prompts: tuple[int, int],
    answers: tuple[int, int], policies: Iterable[str], tabled: bool = True, **more: Any,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Serve requests that come at once with `VARIANTS` of the engine; yield the second pass of each.

    Parameters
    ----------
    compiled
        Compiles the model with further options.
    """
    for variant, (options, of_session) in VARIANTS.items():
        with compiled(**options) as model:
            draws = drawn(model.architecture, seed, prompts=prompts, answers=answers, policies=policies, **more)
            submissions = [*islice(draws, requests)]
            ladder = {"requests": requests, "tokens": prompts[1] + answers[1]} if tabled else None
            for _ in range(2):
                _, found = served(
                    model, poisson(submissions, math.inf, seed), tabled=tabled, ladder=ladder, **of_session
                )
            memory = model.memory()
            left_bytes = memory.budget_bytes - memory.committed["weights"]
            yield {
                "variant": variant,
                "requests": requests,
                **found,
                "live_per_gib": found["most_live"] / (left_bytes / GIB),
            }


MEMORY: Final = (
    "budget", "driver's counter at most", "s", "steps", *TIMES, "tokens/s", "live at most", "ended", "refused", "failures", "maps",
    "maps of the last half", "rows left", "new sizes",
)  # fmt: skip
ABLATION: Final = (
    "variant", "requests", "tokens/s", *TIMES, "a request, ms", "99th, ms", "longest, ms", "live at most", "live per GiB",
    "new sizes",
)  # fmt: skip


def memory_row(point: Mapping[str, Any]) -> list[str]:
    """Return a point's row of the table."""
    ended = ", ".join(f"{count} {finish}" for finish, count in sorted(point["finishes"].items()))
    return [
        *(format_bytes(point[name]) for name in ("budget_bytes", "most_bytes")), f"{point['seconds']:.0f}", f"{point['steps']:,}",
        *shown_times(point), f"{point['tokens_per_s']:,.0f}", f"{point['most_live']}", ended, f"{point['refused']}",
        f"{len(point['failures'])}", *(f"{point[name]}" for name in ("maps", "late_maps", "rows_left", "new_sizes")),
    ]  # fmt: skip


def ablation_row(point: Mapping[str, Any]) -> list[str]:
    """Return a point's row of the table."""
    return [
        point["variant"], f"{point['requests']}", f"{point['tokens_per_s']:,.0f}", *shown_times(point),
        *shown_times(point, "latency_"), f"{point['most_live']}", f"{point['live_per_gib']:.2f}", f"{point['new_sizes']}",
    ]  # fmt: skip
