"""What policies cost in quality, and why, of a trained model: each command writes its results' JSON to `--out`.

python -m benchmarks.quality policies --policies exact,mage:ratio=1/16 --schedules dynamic,static:16
python -m benchmarks.quality estimation --lengths 2k --plot estimation.png
python -m benchmarks.quality decodability --lengths 1k --tasks chain --items 8
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from benchmarks.quality.compare import CompareSettings, compare, configurations
from benchmarks.quality.decodability import DecodabilitySettings, measure
from benchmarks.quality.estimation import EstimationSettings, estimate
from benchmarks.quality.plot import decodability_png, estimation_png
from benchmarks.quality.policies import schedule as read_schedule
from benchmarks.record import command_line
from mosaic.bench.environment import environment
from mosaic.bench.meters import card
from mosaic.bench.quality.run import trained
from mosaic.cli import decoding_options as o
from mosaic.cli import main as run
from mosaic.cli.exports import check_targets, report, say_written
from mosaic.cli.output import new_table, note
from mosaic.cli.request import own_dtype
from mosaic.devices import load_device
from mosaic.errors import UsageError
from mosaic.files import write_atomic
from mosaic.models import load
from mosaic.runtime.compile import compile
from mosaic.units import parse_lengths

if TYPE_CHECKING:
    from rich.table import Table

    from mosaic.runtime.compiled import CompiledModel

__all__ = ["main"]

Result: TypeAlias = Mapping[str, Any]
ModelName: TypeAlias = Annotated[
    str, typer.Option(help="small-sdar, or a checkpoint directory of examples/train_small.")
]
Tasks: TypeAlias = Annotated[
    str, typer.Option(help="Of listing, chain, passage, frequent, and those of `mosaic bench quality`.")
]
Lengths: TypeAlias = Annotated[str, typer.Option(help="Contexts of tasks with a document.")]
Items: TypeAlias = Annotated[int, typer.Option(help="Answers per task and length.")]
Schedule: TypeAlias = Annotated[str, typer.Option(help="Steps of a block: dynamic, dynamic:threshold=0.95, static:16.")]
Seed: TypeAlias = Annotated[int, typer.Option(help="Of the evaluation set and of sampling.")]
Out: TypeAlias = Annotated[Path | None, typer.Option(help="Write the results' JSON.")]
Plot: TypeAlias = Annotated[Path | None, typer.Option(help="Write a picture, PNG; needs the extra 'viz'.")]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the results' JSON and nothing else.")]
LONG: Final = "listing,chain,passage,frequent"

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


@app.command()
def policies(
    model: ModelName = "small-sdar",
    policies: Annotated[
        str,
        typer.Option(
            help="The first is what the others are compared with: exact,mage:ratio=1/16,quest:k=256:page=8,dc+,"
            "focus:alpha=1.2+dc+."
        ),
    ] = "exact,mage:ratio=1/16",
    schedules: Schedule = "dynamic",
    tasks: Tasks = LONG,
    lengths: Lengths = "2k,4k,8k",
    per_cell: Annotated[int, typer.Option(help="Items per task, length and tenth of depth.")] = 1,
    per_task: Annotated[int, typer.Option(help="Items of tasks without a document.")] = 50,
    replay: Annotated[
        int, typer.Option(help="Answers per task and length whose canvases each policy is forced through.")
    ] = 0,
    seed: Seed = 0,
    split: Annotated[str, typer.Option(help="judge; choose: other items, to choose settings on.")] = "judge",
    batch: Annotated[int, typer.Option(help="Answers decoded at a time.")] = 16,
    seconds: Annotated[float, typer.Option(help="No policy begins after that time; 0: all are run.")] = 0.0,
    budget: o.Budget = None,
    device: o.Where = "cpu",
    dtype: o.DType = None,
    threads: o.Threads = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Compare policies of attention, eviction and block caches on the same questions: right answers, forwards, computed tokens."""
    check_targets([out])
    settings = CompareSettings(
        policies=_names(policies), schedules=_names(schedules), tasks=_names(tasks), lengths=parse_lengths(lengths),
        per_cell=per_cell, per_task=per_task, seed=seed, split=split, batch=batch, replay=replay, seconds=seconds,
    )  # fmt: skip
    described = trained(load(model), model)
    configurations(settings, described.architecture)  # before the model is loaded
    dtype = dtype or own_dtype(model, device)
    said = {
        "model": described.name, "device": device, "card": card(load_device(device).backend == "cuda"), "dtype": dtype,
        "environment": environment(command_line()),
    }  # fmt: skip

    def keep(document: Result) -> None:
        if out is not None:
            write_atomic(out, json.dumps({**said, **document}, indent=1) + "\n")

    with compile(described, device=device, budget=budget, dtype=dtype, threads=threads) as compiled:
        result = {**said, **compare(compiled, settings, progress=_told, keep=keep)}
    report(result, _of_policies, out, as_json)


@app.command()
def estimation(
    model: ModelName = "small-sdar",
    ratios: Annotated[str, typer.Option(help="Keys of a set, as shares of the prefix.")] = "1/64,1/16,1/4",
    tasks: Tasks = LONG,
    lengths: Lengths = "2k",
    items: Items = 2,
    schedule: Schedule = "dynamic",
    seed: Seed = 0,
    out: Out = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Measure recall and estimation accuracy of sets of keys (MAGE, figures 1 to 3), on a CPU in float32."""
    settings = EstimationSettings(
        ratios=_numbers(ratios, "ratios are shares of the prefix such as 1/16,1/4"), tasks=_names(tasks),
        lengths=parse_lengths(lengths), items=items, seed=seed, options=read_schedule(schedule),
    )  # fmt: skip
    _along(model, estimate, settings, estimation_png, _of_estimation, out, plot, as_json)


@app.command()
def decodability(
    model: ModelName = "small-sdar",
    eviction: Annotated[str, typer.Option(help="Readings of FOCUS: focus or focus-public.")] = "focus",
    alphas: Annotated[str, typer.Option(help="Tokens kept for each that is expected to be decided.")] = "1.2,1.5,1.8",
    tasks: Tasks = LONG,
    lengths: Lengths = "2k",
    items: Items = 2,
    schedule: Schedule = "dynamic",
    seed: Seed = 0,
    out: Out = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Measure importance against decodability (FOCUS, figures 2 to 4 and 13, table 5), on a CPU in float32."""
    settings = DecodabilitySettings(
        alphas=_numbers(alphas, "alphas are numbers such as 1.2,1.5"), preset=eviction, tasks=_names(tasks),
        lengths=parse_lengths(lengths), items=items, seed=seed, options={**read_schedule(schedule), "ahead": False},
    )  # fmt: skip
    _along(model, measure, settings, decodability_png, _of_decodability, out, plot, as_json)


def _along(
    model: str, measured: Callable[..., dict[str, Any]], settings: Any, picture: Callable[[Result, str], bytes],
    tables: Callable[[Result], Iterator[Table]], out: Path | None, plot: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure a model along its own answers, on a CPU in float32, and write and print what was found."""
    check_targets([out, plot])
    if plot is not None and plot.suffix != ".png":
        raise UsageError(f"--plot writes PNG, got {plot}: give a name that ends in .png.")
    described = load(model)
    if described.path is not None and not described.architecture.block:
        raise UsageError(f"{model} attends in both directions, and this measures block diffusion: give small-sdar.")

    def told(done: int, total: int) -> None:
        note(f"{done} of {total} answers")

    compiled: CompiledModel
    with compile(trained(described, model), dtype="float32") as compiled:
        found = measured(compiled, settings, progress=told)
    result = {"model": described.name, "card": None, "environment": environment(command_line()), **found}
    if plot is not None:
        write_atomic(plot, picture(result, described.name))
        say_written([plot])
    report(result, tables, out, as_json)


def _told(what: str, done: int, total: int) -> None:
    if done == total:
        note(f"{what}: {total:,} answers")


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _numbers(text: str, expected: str) -> tuple[float, ...]:
    try:
        return tuple(float(Fraction(part.strip())) for part in text.split(","))
    except (ValueError, ZeroDivisionError):
        raise UsageError(f"{expected}, got '{text}'.") from None


# --- tables -------------------------------------------------------------------------------------------------------------


def _of_policies(result: Result) -> Iterator[Table]:
    """A table for each schedule: a row for each policy and task."""
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


def _of_estimation(result: Result) -> Iterator[Table]:
    """Estimation accuracy by set of keys, of a block's first step and of the later ones."""
    for when, title in (("first", "first step"), ("later", "later steps")):
        if by_ratio := result[when]:
            table = new_table(title, *(f"k {float(ratio):.3g}" for ratio in by_ratio))
            for name in next(iter(by_ratio.values())):
                table.add_row(name, *(f"{shares[name]:.1%}" for shares in by_ratio.values()))
            yield table


def _of_decodability(result: Result) -> Iterator[Table]:
    """The share of masked tokens that are decided by fifth of a signal's rank, and what each way of decoding computes."""
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


def main() -> None:
    """Run the command that is asked for."""
    run(app)


if __name__ == "__main__":
    main()
