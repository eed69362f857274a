"""The printed output of the commands of `benchmarks.quality`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from mosaic.cli.output import new_table

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["decodability_tables", "estimation_tables", "exact_tables", "policies_tables"]

Result: TypeAlias = Mapping[str, Any]


def exact_tables(result: Result) -> Iterator[Table]:
    """Yield exact match by task, and of the retrieval tasks by length and by depth."""
    by_task = new_table("task", "exact", "with working", "items")
    for task, share in result["by_task"].items():
        by_task.add_row(task, f"{share['exact']:.1%}", f"{share['whole']:.1%}", f"{share['count']:,}")
    yield by_task
    for name, groups in (("length", result["by_length"]), ("depth", result["by_depth"])):
        if keys := sorted({key for shares in groups.values() for key in shares}, key=float):
            shown = (f"{int(key):,}" if name == "length" else f"{float(key):.0%}" for key in keys)
            table = new_table(f"exact by {name}", *shown)
            for task, shares in groups.items():
                table.add_row(task, *(f"{shares[key]['exact']:.1%}" if key in shares else "" for key in keys))
            yield table


def policies_tables(result: Result) -> Iterator[Table]:
    """Yield a table for each schedule: a row for each policy and task."""
    for schedule, by_policy in result["schedules"].items():
        table = new_table(
            schedule, "task", "exact", "against the first", "tokens right", "forwards", "tokens/forward",
            "processed/decoded", "items",
        )  # fmt: skip
        table.columns[1].justify = "left"
        for policy, figures in by_policy.items():
            for task, group in figures["groups"].items():
                if "," not in task:
                    table.add_row(policy, task, *_cells(group))
        yield table


def _cells(group: Result) -> tuple[str, ...]:
    change = ""
    if "against" in group:
        exact = group["against"]["exact"]
        change = f"{exact['difference']:+.1%} ({exact['low']:+.1%}, {exact['high']:+.1%})"
    return (
        f"{group['exact']:.1%}", change, f"{group['tokens_right']:.1%}", f"{group['forwards']:.1f}",
        f"{group['tokens_per_forward']:.2f}", f"{group['processed_per_decoded']:.2f}", f"{group['count']:,}",
    )  # fmt: skip


def estimation_tables(result: Result) -> Iterator[Table]:
    """Yield estimation accuracy by set of keys, of a block's first step and of the later ones."""
    for when, title in (("first", "first step"), ("later", "later steps")):
        if by_ratio := result[when]:
            table = new_table(title, *(f"k {float(ratio):.3g}" for ratio in by_ratio))
            for name in next(iter(by_ratio.values())):
                table.add_row(name, *(f"{shares[name]:.1%}" for shares in by_ratio.values()))
            yield table


def decodability_tables(result: Result) -> Iterator[Table]:
    """Yield the share of masked tokens that are decided by fifth of a signal's rank, and the rows of each run."""
    signals = new_table("signal", "lowest fifth", "", "", "", "highest", "AUC", "of two")
    for name, row in result["signals"].items():
        shares = [f"{part / of:.1%}" if of else "" for part, of in zip(row["decoded"], row["masked"], strict=True)]
        auc = "" if row["auc"] is None else f"{row['auc']:.3f}"
        signals.add_row(name, *shares, auc, "" if row["reached"] is None else f"{row['reached']:.1%}")
    yield signals
    ways = new_table("computed", "steps", "decoded", "in blocks", "again", "per decoded")
    for name, row in result["ways"].items():
        counts = (f"{row[part]:,}" for part in ("steps", "decoded", "computed", "again"))
        ways.add_row(name, *counts, f"{row['computed_per_decoded']:.2f}")
    yield ways
