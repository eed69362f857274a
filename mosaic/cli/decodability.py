"""`mosaic bench decodability`: which tokens a step decides, whether importance tells, and what eviction computes."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mosaic.cli.output import note, print_json, results
from mosaic.cli.request import require_torch
from mosaic.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["decodability"]


def decodability(
    model: Annotated[str, typer.Option(help="small-sdar, or a checkpoint directory of examples/train_small.")] = (
        "small-sdar"
    ),
    eviction: Annotated[str, typer.Option(help="Readings of FOCUS: focus or focus-public.")] = "focus",
    alphas: Annotated[str, typer.Option(help="Tokens kept for each that is expected to be decided.")] = "1.2,1.5,1.8",
    tasks: Annotated[str, typer.Option(help="Of listing, chain, passage, frequent, retrieval, pair, addition, …")] = (
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
    """Measure importance against decodability (FOCUS, figures 2 to 4 and 13, table 5), on a CPU in float32."""
    require_torch("`mosaic bench decodability`")
    from mosaic.bench.environment import environment
    from mosaic.bench.quality.decodability import DecodabilitySettings, measure
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
    settings = DecodabilitySettings(
        alphas=_numbers(alphas), preset=eviction, tasks=tuple(part.strip() for part in tasks.split(",")),
        lengths=parse_lengths(lengths), items=items, seed=seed, options={**read_schedule(schedule), "ahead": False},
    )  # fmt: skip
    described = load(model)
    if described.path is None:
        raise UsageError(f"{model} is a preset with random weights: give small-sdar or a checkpoint directory.")
    if not described.architecture.block:
        raise UsageError(f"{model} attends in both directions: eviction is for block diffusion; give small-sdar.")
    check_vocabulary(Path(described.path))
    with compile(described, dtype="float32") as compiled:
        found = measure(compiled, settings, progress=lambda done, total: note(f"{done} of {total} answers"))
    result = {
        "model": described.name, "card": None, "environment": environment(shlex.join(["mosaic", *sys.argv[1:]])), **found
    }  # fmt: skip
    if out is not None:
        write_atomic(out, json.dumps(result, indent=1) + "\n")
    if plot is not None:
        from mosaic.bench.quality.plot import decodability_png

        write_atomic(plot, decodability_png(result, described.name))
    say_written([out, plot])
    if as_json:
        print_json(result)
        return
    for table in tables(result):
        results().print(table)
        results().print()


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"alphas are numbers such as 1.2,1.5, got '{text}'.") from None


def tables(result: dict[str, Any]) -> list[Table]:
    """Return the share of masked tokens that are decided by fifth of a signal's rank, and what each way of decoding computes."""
    from rich.table import Table

    signals = Table(box=None, padding=(0, 1))
    for name in ("signal", "lowest fifth", "", "", "", "highest", "AUC"):
        signals.add_column(name, justify="left" if name == "signal" else "right", header_style="dim", no_wrap=True)
    for name, row in result["signals"].items():
        shares = [f"{part / of:.1%}" if of else "" for part, of in zip(row["decoded"], row["masked"], strict=True)]
        signals.add_row(name, *shares, "" if row["auc"] is None else f"{row['auc']:.3f}")
    ways = Table(box=None, padding=(0, 1))
    for name in ("computed", "steps", "decoded", "in blocks", "again", "per decoded"):
        ways.add_column(name, justify="left" if name == "computed" else "right", header_style="dim", no_wrap=True)
    for name, row in result["ways"].items():
        counts = (f"{row[part]:,}" for part in ("steps", "decoded", "computed", "again"))
        ways.add_row(name, *counts, f"{row['computed_per_decoded']:.2f}")
    return [signals, ways]
