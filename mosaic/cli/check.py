"""`mosaic check`: prove a plan file with the independent checker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mosaic.cli.output import print_json, results

__all__ = ["check"]


def check(
    file: Annotated[Path, typer.Argument(help="A plan's JSON.", metavar="PLAN.JSON")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Verify every claim of a plan from its file alone. Exit code 1 when one does not hold."""
    from mosaic.planner.check import check_plan
    from mosaic.planner.plan import Plan
    from mosaic.units import format_bytes

    plan = Plan.load(file)
    violations = check_plan(plan.document)
    if as_json:
        print_json(
            {"valid": not violations, "violations": [{"code": v.code, "message": v.message} for v in violations]}
        )
    elif violations:
        results().print(
            f"{file}: not valid, {len(violations)} violation{'s' if len(violations) > 1 else ''}", markup=False
        )
        for violation in violations:
            results().print(f"  {violation.code}: {violation.message}", markup=False)
    else:
        ops, buffers = len(plan.document["ops"]), len(plan.document["buffers"])
        bound = "equals" if plan.optimal else "is above"
        results().print(
            f"{file}: valid. {buffers} buffers over {ops} ops, no overlap; the workspace's peak {format_bytes(plan.peak_bytes)} "
            f"{bound} its lower bound.", markup=False,
        )  # fmt: skip
    raise typer.Exit(1 if violations else 0)
