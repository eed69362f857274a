"""`mosaic check`: prove a plan file with the independent checker, and list claims that no file proves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mosaic.cli.output import print_json, results

if TYPE_CHECKING:
    from mosaic.planner.check import Unproved
    from mosaic.planner.plan import Plan


def check(
    file: Annotated[Path, typer.Argument(help="A plan's JSON.", metavar="PLAN.JSON")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Also plan again with this model, as the file says it was, and compare: preset or directory."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Prove a plan from its file: memory, operators, formula. Lists what no file alone can prove; --model plans again.

    Exit code 1 when a claim does not hold.
    """
    from mosaic.planner.check import check_plan, unproved_claims, unverified_operators
    from mosaic.planner.plan import Plan

    plan = Plan.load(file)
    found = [(violation.code, violation.message) for violation in check_plan(plan.document)]
    if model is not None and not found:
        found = _differences(plan, model)
    unverified = () if found else unverified_operators(plan.document)
    unproved = [] if found or model is not None else unproved_claims(plan.document)
    if as_json:
        print_json(
            {
                "valid": not found,
                "violations": [{"code": code, "message": message} for code, message in found],
                "unverified": list(unverified),
                "unproved": [{"claim": claim, "needs": needs} for claim, needs in unproved],
            }
        )
    elif found:
        many = f"{len(found)} violation{'s' if len(found) > 1 else ''}"
        _print(f"{file}: not valid, {many}", *(f"  {code}: {message}" for code, message in found))
    else:
        but = f", but for unverified operators: {', '.join(unverified)}" if unverified else ""
        _print(f"{file}: valid{but}.", *_proved(plan), *_not_proved(unproved, model))
    raise typer.Exit(1 if found else 0)


def _print(*lines: str) -> None:
    for line in lines:
        results().print(line, markup=False)


def _proved(plan: Plan) -> Sequence[str]:
    """The proved claims of a valid file, one per line."""
    from mosaic.units import format_bytes

    ops, buffers = len(plan.records.ops), len(plan.records.buffers)
    bound = "equals" if plan.optimal else "is above"
    return (
        f"  memory: {buffers} buffers over {ops} ops, no overlap; peak {format_bytes(plan.peak_bytes)} {bound} the lower bound",
        f"  totals: sizes, pools, components, {format_bytes(plan.total_bytes)} in all, and whether they fit",
        "  operators: shapes, dtypes, slices, FLOPs and bytes of the kernels that Mosaic ships",
        "  statements: peak formula, configuration and dims as far as loops and inputs show them",
    )


def _not_proved(unproved: Sequence[Unproved], model: str | None) -> Sequence[str]:
    if model is not None:
        return (f"  planned again with {model}: every field is the same",)
    return ("not provable from the file alone:", *(f"  {entry}" for entry in unproved))


# Planning again.


def _differences(plan: Plan, model: str) -> list[tuple[str, str]]:
    """Fields in which a file and this version's plan of the same request differ."""
    again = _plan_again(plan.document, model)
    given, made = plan.document, again.document
    return [
        ("replan", f"{key} is {_short(given.get(key))}, planned again {_short(made.get(key))}")
        for key in dict.fromkeys((*made, *given))
        if given.get(key) != made.get(key)
    ]


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)} other entries"
    return repr(value)


def _plan_again(document: Mapping[str, Any], model: str) -> Plan:
    """Plan the request of a file again: one sequence of a full step, as `mosaic plan` does."""
    from mosaic.errors import UsageError
    from mosaic.models import load
    from mosaic.planner import Planner
    from mosaic.planner.request import DEFAULT_MASK_RATIO, Request

    dims = document["dims"]
    if document["phase"] != "full_step" or dims["seqs"] != 1:
        raise UsageError(
            "--model plans one sequence of a full step again; a plan's file does not say the lengths of several sequences."
        )
    rows = {"logit_rows": dims.get("logit_rows", 0)}
    request = Request(seq_lens=(dims["tokens"],), mask_ratio=DEFAULT_MASK_RATIO, **rows)
    if request.size.rows != dims["masked"]:
        request = Request(seq_lens=(dims["tokens"],), masked=dims["masked"], **rows)
    loaded = load(model)
    if document["dtype"] != loaded.architecture.dtype:
        loaded = loaded.with_dtype(document["dtype"])
    budgets = {"budget": document["budget_bytes"], "host_budget": document["host_budget_bytes"]}
    return Planner(loaded, device=document["device"], **budgets).plan(request)
