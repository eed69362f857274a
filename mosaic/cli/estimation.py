"""`mosaic bench estimation`: how well sets of keys serve a block, along a model's own answers."""

from __future__ import annotations

import json
import shlex
import sys
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mosaic.cli.output import note, print_json, results
from mosaic.cli.request import require_torch
from mosaic.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["estimation"]


def estimation(
    model: Annotated[str, typer.Option(help="small-sdar, or a checkpoint directory of examples/train_small.")] = (
        "small-sdar"
    ),
    ratios: Annotated[str, typer.Option(help="Keys of a set, as shares of the prefix.")] = "1/64,1/16,1/4",
    tasks: Annotated[str, typer.Option(help="Of listing, chain, passage, frequent, retrieval, pair.")] = (
        "listing,chain,passage,frequent"
    ),
    lengths: Annotated[str, typer.Option(help="Contexts.")] = "2k",
    items: Annotated[int, typer.Option(help="Answers per task and length.")] = 2,
    schedule: Annotated[str, typer.Option(help="Steps of a block: dynamic, dynamic:threshold=0.95, static:16.")] = (
        "dynamic"
    ),
    seed: Annotated[int, typer.Option(help="Of the evaluation set.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the results' JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture, PNG; needs the extra 'viz'.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results' JSON and nothing else.")] = False,
) -> None:
    """Measure recall and estimation accuracy of sets of keys (MAGE, figures 1 to 3), on a CPU in float32."""
    require_torch("`mosaic bench estimation`")
    from mosaic.bench.environment import environment
    from mosaic.bench.quality.estimation import EstimationSettings, estimate
    from mosaic.bench.quality.policies import schedule as read_schedule
    from mosaic.bench.quality.run import check_vocabulary
    from mosaic.cli.exports import check_targets, say_written
    from mosaic.files import write_atomic
    from mosaic.models import load
    from mosaic.runtime.compile import compile
    from mosaic.units import parse_lengths

    check_targets([out, plot])
    if plot is not None and plot.suffix != ".png":
        raise UsageError(f"--plot writes PNG, got {plot}: give a name that ends in .png.")
    settings = EstimationSettings(
        ratios=_ratios(ratios), tasks=tuple(part.strip() for part in tasks.split(",")), lengths=parse_lengths(lengths),
        items=items, seed=seed, options=read_schedule(schedule),
    )  # fmt: skip
    described = load(model)
    if described.path is None:
        raise UsageError(f"{model} is a preset with random weights: give small-sdar or a checkpoint directory.")
    if not described.architecture.block:
        raise UsageError(f"{model} attends in both directions: sets of keys are of block diffusion; give small-sdar.")
    check_vocabulary(Path(described.path))
    with compile(described, dtype="float32") as compiled:
        found = estimate(compiled, settings, progress=lambda done, total: note(f"{done} of {total} answers"))
    result = {
        "model": described.name, "card": None, "environment": environment(shlex.join(["mosaic", *sys.argv[1:]])), **found
    }  # fmt: skip
    if out is not None:
        write_atomic(out, json.dumps(result, indent=1) + "\n")
    if plot is not None:
        from mosaic.bench.quality.plot import estimation_png

        write_atomic(plot, estimation_png(result, described.name))
    say_written([out, plot])
    if as_json:
        print_json(result)
        return
    for table in tables(result):
        results().print(table)
        results().print()


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
