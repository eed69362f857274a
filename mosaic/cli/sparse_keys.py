"""`mosaic plan --cache`: the steps of a canvas with sparse keys, side by side."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from functools import partial
from math import ceil
from typing import TYPE_CHECKING

from mosaic.cli.output import new_table, results
from mosaic.errors import UsageError

if TYPE_CHECKING:
    from mosaic.models.policies.sparse_keys import SparseKeys
    from mosaic.models.step import StepSize
    from mosaic.planner.planner import Planner
    from mosaic.planner.request import Request
    from mosaic.planner.schedule import Schedule

BLOCK, ANSWER = 32, 128
"""Tokens of a block and of an answer, if none are given."""


def requests_of(
    planner: Planner, ctx: str | None, cache: SparseKeys | str, block: int | None, answer: int | None
) -> tuple[dict[str, Request], dict[str, int]]:
    """Return the steps of a canvas of `ctx` positions by name, the last of which are the answer, and how often each runs."""
    from mosaic.models.parts import Commit
    from mosaic.models.phase import Phase
    from mosaic.planner.request import Request
    from mosaic.units import parse_tokens

    if isinstance(cache, str):
        raise UsageError(f"--cache plans the steps of sparse keys; use --cache sparse, not {cache}.")
    cache.check(planner.model.architecture)
    if ctx is None or ctx == "auto":
        raise UsageError("--cache plans the steps of a canvas: give its positions, such as --ctx 128k.")
    length, tokens = parse_tokens(ctx), BLOCK if block is None else block
    answer = (
        max(min(ANSWER, length - 1) // tokens, 1) * tokens if answer is None and 0 < tokens < length else answer or 0
    )
    if not 0 < tokens < length:
        raise UsageError(
            f"--block-length is {tokens}; a block has 1 to {length - 1:,} of the canvas' {length:,} positions."
        )
    if not 0 < answer < length or answer % tokens:
        raise UsageError(
            f"--gen-length is {answer}; an answer has whole blocks of {tokens} of the canvas' {length:,} positions."
        )

    def sized(name: str, positions: int) -> StepSize:
        return cache.steps(phase, max(positions, answer + 1), tokens, answer=answer)[name]

    phase = Phase(commit=Commit(score="confidence", rule="top"))
    shifted = planner.model.architecture.shifted
    requests = {
        name: Request(
            seq_lens=size.windows, key_lens=size.keys, masked=size.rows, phase=size.phase, states=size.states,
            sized=partial(sized, name),
        )
        for name, size in cache.steps(phase, length, tokens, answer=answer).items()
    }  # fmt: skip
    times = cache.times(answer, tokens, shifted=shifted)
    return requests, {name: times[name] for name in requests}


def largest_retention(
    planner: Planner, ctx: str | None, cache: SparseKeys, block: int | None, answer: int | None
) -> float:
    """Return the largest retention below that of `cache`, in hundredths, with which each step fits; 0 if none does."""

    def misfits(hundredths: int) -> bool:
        fewer = replace(cache, retention=hundredths / 100)
        return not all(map(planner.fits, requests_of(planner, ctx, fewer, block, answer)[0].values()))

    return bisect_left(range(1, ceil(100 * cache.retention)), True, key=misfits) / 100


def figures(schedule: Schedule) -> dict[str, dict[str, float]]:
    """Return of each step how often it runs, its predicted milliseconds, and its bytes: in all, of packed keys, and on the host."""
    return {
        name: {
            "times": schedule.times[name],
            "predicted_step_ms": plan.predicted_step_ms,
            "total_bytes": plan.total_bytes,
            "packed_bytes": plan.pools["state/packed"],
            "host_bytes": plan.document["host_bytes"],
        }
        for name, plan in schedule.plans.items()
    }


def report_steps(schedule: Schedule, cache: SparseKeys) -> None:
    """Print the steps side by side, and what all take together."""
    from mosaic.units import format_bytes, format_seconds

    table = new_table("step", "times", "predicted", "together", "in all", "packed keys", "on the host")
    table.title, table.title_justify = f"cache {cache}; streamed: {schedule.stream}", "left"
    for name, row in figures(schedule).items():
        table.add_row(
            name, f"{row['times']:,}", f"{row['predicted_step_ms']:,.2f} ms",
            format_seconds(row["times"] * row["predicted_step_ms"] / 1e3),
            *(format_bytes(int(row[f"{what}_bytes"])) for what in ("total", "packed", "host")),
        )  # fmt: skip
    table.add_row(
        "all", f"{sum(schedule.times.values()):,}", "", format_seconds(schedule.predicted_ms / 1e3), "", "", ""
    )
    results().print(table)
