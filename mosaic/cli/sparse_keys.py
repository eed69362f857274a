"""`mosaic plan --cache`: the steps of a canvas with sparse keys, side by side."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mosaic.cli.output import new_table, results
from mosaic.errors import UsageError

if TYPE_CHECKING:
    from mosaic.models.policies.sparse_keys import SparseKeys
    from mosaic.models.step import StepSize
    from mosaic.planner.plan import Plan
    from mosaic.planner.planner import Planner
    from mosaic.planner.request import Request

BLOCK = 32
"""Tokens of a block, if none are given."""


def requests_of(planner: Planner, ctx: str | None, cache: SparseKeys | str, block: int | None) -> dict[str, Request]:
    """Return the steps of a canvas of `ctx` positions by name."""
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
    if not 0 < tokens < length:
        raise UsageError(
            f"--block-length is {tokens}; a block has 1 to {length - 1:,} of the canvas' {length:,} positions."
        )

    def sized(name: str, positions: int) -> StepSize:
        return cache.steps(phase, max(positions, tokens + 1), tokens)[name]

    phase = Phase(commit=Commit(score="confidence", rule="top"))
    return {
        name: Request(
            seq_lens=size.windows, key_lens=size.keys, masked=size.rows, phase=size.phase, states=size.states,
            sized=partial(sized, name),
        )
        for name, size in cache.steps(phase, length, tokens).items()
    }  # fmt: skip


def figures(plans: dict[str, Plan]) -> dict[str, dict[str, float]]:
    """Return each step's predicted milliseconds, and its bytes: in all, and of packed keys."""
    return {
        name: {
            "predicted_step_ms": plan.predicted_step_ms,
            "total_bytes": plan.total_bytes,
            "packed_bytes": plan.pools["state/packed"],
        }
        for name, plan in plans.items()
    }


def report_steps(found: dict[str, dict[str, float]], cache: SparseKeys) -> None:
    """Print the steps side by side."""
    from mosaic.units import format_bytes

    table = new_table("step", "predicted", "in all", "packed keys")
    table.title, table.title_justify = f"cache {cache}", "left"
    for name, row in found.items():
        table.add_row(
            name, f"{row['predicted_step_ms']:,.2f} ms", format_bytes(int(row["total_bytes"])),
            format_bytes(int(row["packed_bytes"])),
        )  # fmt: skip
    results().print(table)
