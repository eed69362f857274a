"""`mosaic bench decodability`: which tokens a step decides, whether importance tells, and what eviction computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mosaic.cli import answers
from mosaic.cli.request import require_torch
from mosaic.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["decodability"]


def decodability(
    model: answers.ModelName = "small-sdar",
    eviction: Annotated[str, typer.Option(help="Readings of FOCUS: focus or focus-public.")] = "focus",
    alphas: Annotated[str, typer.Option(help="Tokens kept for each that is expected to be decided.")] = "1.2,1.5,1.8",
    tasks: Annotated[str, typer.Option(help="Of listing, chain, passage, frequent, retrieval, pair, addition, …")] = (
        "listing,chain,passage,frequent"
    ),
    lengths: answers.Lengths = "2k",
    items: answers.Items = 2,
    schedule: answers.Schedule = "dynamic",
    seed: answers.Seed = 0,
    out: answers.Out = None,
    plot: answers.Plot = None,
    as_json: answers.AsJson = False,
) -> None:
    """Measure importance against decodability (FOCUS, figures 2 to 4 and 13, table 5), on a CPU in float32."""
    require_torch("`mosaic bench decodability`")
    from mosaic.bench.quality.decodability import DecodabilitySettings, measure
    from mosaic.bench.quality.plot import decodability_png
    from mosaic.bench.quality.policies import schedule as read_schedule
    from mosaic.units import parse_lengths

    answers.check_files(out, plot)
    settings = DecodabilitySettings(
        alphas=_numbers(alphas), preset=eviction, tasks=answers.split(tasks), lengths=parse_lengths(lengths), items=items,
        seed=seed, options={**read_schedule(schedule), "ahead": False},
    )  # fmt: skip
    answers.measure_along(
        model, "eviction is for block diffusion", lambda compiled, progress: measure(compiled, settings, progress=progress),
        decodability_png, tables, out=out, plot=plot, as_json=as_json,
    )  # fmt: skip


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"alphas are numbers such as 1.2,1.5, got '{text}'.") from None


def tables(result: dict[str, Any]) -> list[Table]:
    """Return the share of masked tokens that are decided by fifth of a signal's rank, and what each way of decoding computes."""
    from rich.table import Table

    signals = Table(box=None, padding=(0, 1))
    for name in ("signal", "lowest fifth", "", "", "", "highest", "AUC", "of two"):
        signals.add_column(name, justify="left" if name == "signal" else "right", header_style="dim", no_wrap=True)
    for name, row in result["signals"].items():
        shares = [f"{part / of:.1%}" if of else "" for part, of in zip(row["decoded"], row["masked"], strict=True)]
        signals.add_row(name, *shares, "" if row["auc"] is None else f"{row['auc']:.3f}",
            "" if row["reached"] is None else f"{row['reached']:.1%}",
        )  # fmt: skip
    ways = Table(box=None, padding=(0, 1))
    for name in ("computed", "steps", "decoded", "in blocks", "again", "per decoded"):
        ways.add_column(name, justify="left" if name == "computed" else "right", header_style="dim", no_wrap=True)
    for name, row in result["ways"].items():
        counts = (f"{row[part]:,}" for part in ("steps", "decoded", "computed", "again"))
        ways.add_row(name, *counts, f"{row['computed_per_decoded']:.2f}")
    return [signals, ways]
