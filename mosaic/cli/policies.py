"""`mosaic bench policies`: attention, eviction, block caches and schedules side by side on the same questions, forwards counted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mosaic.cli import answers
from mosaic.cli import decoding_options as o
from mosaic.cli.output import note
from mosaic.cli.request import own_dtype, require_torch

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["policies"]


def policies(
    model: Annotated[str, typer.Option(help="small-sdar, or a checkpoint directory of examples/train_small.")] = (
        "small-sdar"
    ),
    policies: Annotated[
        str,
        typer.Option(
            help="The first is what the others are compared with: exact,mage:ratio=1/16,quest:k=256:page=8,dc+,"
            "focus:alpha=1.2+dc+."
        ),
    ] = "exact,mage:ratio=1/16",
    schedules: Annotated[
        str, typer.Option(help="Steps of a block: dynamic, dynamic:threshold=0.95, static:16.")
    ] = "dynamic",
    tasks: Annotated[
        str, typer.Option(help="Of listing, chain, passage, frequent, and those of `mosaic bench quality`.")
    ] = "listing,chain,passage,frequent",
    lengths: Annotated[str, typer.Option(help="Contexts of tasks with a document.")] = "2k,4k,8k",
    per_cell: Annotated[int, typer.Option(help="Items per task, length and tenth of depth.")] = 1,
    per_task: Annotated[int, typer.Option(help="Items of tasks without a document.")] = 50,
    replay: Annotated[
        int, typer.Option(help="Answers per task and length whose canvases each policy is forced through.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of the evaluation set and of sampling.")] = 0,
    split: Annotated[str, typer.Option(help="judge; choose: other items, to choose settings on.")] = "judge",
    batch: Annotated[int, typer.Option(help="Answers decoded at a time.")] = 16,
    seconds: Annotated[float, typer.Option(help="No policy begins after that time; 0: all are run.")] = 0.0,
    budget: o.Budget = None,
    device: o.Where = "cpu",
    dtype: o.DType = None,
    threads: o.Threads = None,
    out: Annotated[Path | None, typer.Option(help="Write the results' JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results' JSON and nothing else.")] = False,
) -> None:
    """Compare policies of attention, eviction and block caches on the same questions: right answers, forwards, computed tokens."""
    from mosaic.bench.quality.compare import CompareSettings, compare, configurations
    from mosaic.models import load
    from mosaic.units import parse_lengths

    answers.check_files(out, None)
    require_torch("`mosaic bench policies`")
    settings = CompareSettings(
        policies=answers.split(policies), schedules=answers.split(schedules), tasks=answers.split(tasks),
        lengths=parse_lengths(lengths), per_cell=per_cell, per_task=per_task, seed=seed, split=split, batch=batch, replay=replay,
        seconds=seconds,
    )  # fmt: skip
    described = answers.trained(load(model), model)
    configurations(settings, described.architecture)  # before the model is loaded

    from mosaic.bench.meters import card
    from mosaic.devices import load_device
    from mosaic.runtime.compile import compile

    where = card(load_device(device).backend == "cuda")
    dtype = dtype or own_dtype(model, device)
    said = {
        "model": described.name, "device": device, "card": where, "dtype": dtype,
        "environment": answers.said_by(),
    }  # fmt: skip

    def keep(document: Mapping[str, Any]) -> None:
        answers.write_result({**said, **document}, out)

    with compile(described, device=device, budget=budget, dtype=dtype, threads=threads) as compiled:
        result = {**said, **compare(compiled, settings, progress=_progress, keep=keep)}
    answers.show(result, tables, [out], as_json)


def _progress(what: str, done: int, total: int) -> None:
    if done == total:
        note(f"{what}: {total:,} answers")


def tables(result: dict[str, Any]) -> list[Table]:
    """Return a table for each schedule: a row for each policy and task."""
    from rich.table import Table

    found = []
    for schedule, by_policy in result["schedules"].items():
        table = Table(box=None, padding=(0, 1))
        columns = (
            "policy",
            "task",
            "exact",
            "against the first",
            "tokens right",
            "forwards",
            "tokens/forward",
            "processed/decoded",
            "items",
        )
        for column in (schedule, *columns[1:]):
            left = column in (schedule, "task")
            table.add_column(
                column, justify="left" if left else "right", header_style="dim", no_wrap=left or "against" in column
            )
        for policy, figures in by_policy.items():
            for task, group in figures["groups"].items():
                if "," not in task:
                    table.add_row(policy, task, *_cells(group))
        found.append(table)
    return found


def _cells(group: dict[str, Any]) -> tuple[str, ...]:
    change = ""
    if "against" in group:
        exact = group["against"]["exact"]
        change = f"{exact['difference']:+.1%} ({exact['low']:+.1%}, {exact['high']:+.1%})"
    return (
        f"{group['exact']:.1%}", change, f"{group['tokens_right']:.1%}", f"{group['forwards']:.1f}",
        f"{group['tokens_per_forward']:.2f}", f"{group['processed_per_decoded']:.2f}", f"{group['count']:,}",
    )  # fmt: skip
