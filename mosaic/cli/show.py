"""`mosaic show`: a plan file as a summary, a report, a picture or a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mosaic.cli.output import report_plan
from mosaic.cli.request import read_plan


def show(
    file: Annotated[Path, typer.Argument(help="A plan's JSON.", metavar="PLAN.JSON")],
    explain: Annotated[bool, typer.Option(help="Add the peak formula and the search trace.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained HTML report.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the timeline and address map as PNG.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto.")] = None,
    snapshot: Annotated[Path | None, typer.Option(help="Write a snapshot for PyTorch's memory_viz.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan's JSON and nothing else.")] = False,
) -> None:
    """Show a plan."""
    from mosaic.cli.exports import check_targets, export

    targets = {"html": html, "png": png, "trace": trace, "snapshot": snapshot}
    check_targets(targets.values())
    plan = read_plan(file)
    export(plan.document, targets)
    report_plan(plan.document, as_json, explain)
