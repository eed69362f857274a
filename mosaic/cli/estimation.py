"""`mosaic bench estimation`: how well sets of keys serve a block, along a model's own answers."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mosaic.cli import answers
from mosaic.cli.request import require_torch
from mosaic.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["estimation"]


def estimation(
    model: answers.ModelName = "small-sdar",
    ratios: Annotated[str, typer.Option(help="Keys of a set, as shares of the prefix.")] = "1/64,1/16,1/4",
    tasks: Annotated[str, typer.Option(help="Of listing, chain, passage, frequent, retrieval, pair.")] = (
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
    """Measure recall and estimation accuracy of sets of keys (MAGE, figures 1 to 3), on a CPU in float32."""
    require_torch("`mosaic bench estimation`")
    from mosaic.bench.quality.estimation import EstimationSettings, estimate
    from mosaic.bench.quality.plot import estimation_png
    from mosaic.bench.quality.policies import schedule as read_schedule
    from mosaic.units import parse_lengths

    answers.check_files(out, plot)
    settings = EstimationSettings(
        ratios=_ratios(ratios), tasks=answers.split(tasks), lengths=parse_lengths(lengths), items=items, seed=seed,
        options=read_schedule(schedule),
    )  # fmt: skip
    answers.measure_along(
        model, "sets of keys are of block diffusion", lambda compiled, progress: estimate(compiled, settings, progress=progress),
        estimation_png, tables, out=out, plot=plot, as_json=as_json,
    )  # fmt: skip


def _ratios(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(Fraction(part.strip())) for part in text.split(","))
    except (ValueError, ZeroDivisionError):
        raise UsageError(f"ratios are shares of the prefix such as 1/16,1/4, got '{text}'.") from None


def tables(result: dict[str, Any]) -> list[Table]:
    """Return estimation accuracy by set of keys, of a block's first step and of the later ones."""
    from rich.table import Table

    found = []
    for when in ("first", "later"):
        if not result[when]:
            continue
        table = Table(box=None, padding=(0, 1))
        table.add_column(f"{when} steps" if when == "later" else "first step", header_style="dim", no_wrap=True)
        for ratio in result[when]:
            table.add_column(f"k {float(ratio):.3g}", justify="right", header_style="dim", no_wrap=True)
        for name in next(iter(result[when].values())):
            table.add_row(name, *(f"{shares[name]:.1%}" for shares in result[when].values()))
        found.append(table)
    return found
