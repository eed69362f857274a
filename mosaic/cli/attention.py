"""`mosaic plan --attention`: the steps of one block over kept keys, exact and sparse side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mosaic.cli.output import results
from mosaic.errors import UsageError

if TYPE_CHECKING:
    from mosaic.models.sparse import SparseAttention
    from mosaic.planner.plan import Plan
    from mosaic.planner.planner import Planner
    from mosaic.planner.request import Request

__all__ = ["figures", "report_steps", "requests_of"]


def requests_of(planner: Planner, ctx: str | None, attention: SparseAttention) -> dict[str, Request]:
    """Return the steps of one block at the end of a context: exact, the block's first, and a later one."""
    from mosaic.models.parts import KEPT, Commit
    from mosaic.models.parts.selected import Selected
    from mosaic.models.phase import Phase
    from mosaic.planner.request import Request
    from mosaic.units import parse_tokens

    arch = planner.model.architecture
    attention.check(arch)
    if ctx is None or ctx == "auto":
        raise UsageError("--attention plans a block over the keys of a context: give one, such as --ctx 128k.")
    keys, commit = parse_tokens(ctx), Commit(score="confidence", rule="dynamic")
    several = 2 * arch.block <= keys and attention.selects == "first"
    windows = {"exact": arch.block, "first": 2 * arch.block if several else arch.block, "later": arch.block}
    caches: dict[str, Any] = {
        "exact": KEPT,
        "first": Selected(attention=attention, selects=True),
        "later": Selected(attention=attention, selects=attention.selects == "every"),
    }
    return {
        name: Request(
            seq_lens=(min(window, keys),), key_lens=(keys,), masked=min(arch.block, keys),
            phase=Phase(cache=caches[name], commit=commit),
        )
        for name, window in windows.items()
    }  # fmt: skip


def figures(plans: dict[str, Plan]) -> dict[str, dict[str, float]]:
    """Return of each step its predicted milliseconds and its bytes: in all, of states, and of what is selected, by what."""
    return {
        name: {
            "predicted_step_ms": plan.predicted_step_ms,
            "total_bytes": plan.total_bytes,
            "state_bytes": plan.components["state"],
            "selected_bytes": sum(
                size for pool, size in plan.pools.items() if pool.startswith(("state/selected", "state/pages"))
            ),
        }
        for name, plan in plans.items()
    }


def report_steps(found: dict[str, dict[str, float]], attention: SparseAttention, block: int) -> None:
    """Print the steps side by side, and what a block of as many steps as tokens takes."""
    from rich.table import Table

    from mosaic.units import format_bytes

    table = Table(
        box=None, padding=(0, 2), title=f"attention {attention}, one block of {block} tokens", title_justify="left"
    )
    for name in ("step", "predicted", "in all", "selection"):
        table.add_column(name, justify="left" if name == "step" else "right")
    said = {"exact": "exact", "first": "sparse, first of a block", "later": "sparse, later"}
    for name, row in found.items():
        table.add_row(
            said[name], f"{row['predicted_step_ms']:,.2f} ms", format_bytes(int(row["total_bytes"])),
            format_bytes(int(row["selected_bytes"])),
        )  # fmt: skip
    results().print(table)
    first, later, exact = (found[name]["predicted_step_ms"] for name in ("first", "later", "exact"))
    selecting = attention.selecting(block)
    sparse = selecting * first + (block - selecting) * later
    results().print(f"a block of {block} steps: {block * exact:,.1f} ms exact, {sparse:,.1f} ms sparse")
