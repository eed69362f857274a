"""The quality of a trained model under policies, and why it differs: each command writes its results' JSON to `--out`.

python -m benchmarks.quality exact --model small --lengths 256,512,1k,2k --per-task 20
python -m benchmarks.quality policies --policies exact,mage:ratio=1/16 --schedules dynamic,static:16
python -m benchmarks.quality policies --model small --tasks retrieval,pair,sorting,story --policies exact,dual,sparse
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

from benchmarks.bench.environment import environment
from benchmarks.bench.meters import card
from benchmarks.quality.compare import CompareSettings, compare, configurations
from benchmarks.quality.decodability import DecodabilitySettings, measure
from benchmarks.quality.estimation import EstimationSettings, estimate
from benchmarks.quality.exact import ExactSettings, measure_exact, trained
from benchmarks.quality.plot import decodability_png, estimation_png
from benchmarks.quality.policies import schedule as read_schedule
from benchmarks.quality.tables import decodability_tables, estimation_tables, exact_tables, policies_tables
from benchmarks.record import command_line
from mosaic.cli import decoding_options as o
from mosaic.cli import main as run
from mosaic.cli.exports import check_targets, report, say_written
from mosaic.cli.output import note
from mosaic.cli.request import own_dtype, scaled
from mosaic.devices import load_device
from mosaic.errors import UsageError
from mosaic.files import write_atomic
from mosaic.models import load
from mosaic.runtime.compile import compile
from mosaic.units import parse_lengths

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.quality.scoring import Score
    from mosaic.models import Model
    from mosaic.runtime.compiled import CompiledModel

__all__ = ["main"]

Result: TypeAlias = Mapping[str, Any]
ModelName: TypeAlias = Annotated[
    str, typer.Option(help="small-sdar, or a checkpoint directory of examples/train_small.")
]
AnyModel: TypeAlias = Annotated[
    str, typer.Option(help="small, small-sdar, or a checkpoint directory of examples/train_small.")
]
Tasks: TypeAlias = Annotated[str, typer.Option(help="Of listing, chain, passage, frequent, and the tasks of `exact`.")]
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
def exact(
    context: typer.Context,
    model: AnyModel = "small",
    tasks: Annotated[
        str,
        typer.Option(
            help="Of retrieval, pair, addition, subtraction, multiplication, sorting, story; listing, chain, passage, frequent."
        ),
    ] = "retrieval,pair,addition,subtraction,multiplication,sorting,story",
    lengths: Annotated[str, typer.Option(help="Contexts of the retrieval tasks.")] = "256,512,1k,2k",
    per_cell: Annotated[int, typer.Option(help="Retrieval items per length and tenth of depth.")] = 1,
    per_task: Annotated[int, typer.Option(help="Items of every other task.")] = 20,
    gen_length: Annotated[int | None, typer.Option(help="Tokens to generate; by default each task's need.")] = None,
    steps: o.Steps = None,
    block_length: o.BlockLength = None,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    top_k: o.TopK = None,
    remasking: o.Remasking = None,
    algorithm: o.Algorithm = None,
    alg: o.Alg = None,
    alg_temp: o.AlgTemp = None,
    threshold: o.Threshold = None,
    factor: o.Factor = None,
    cache: o.Cache = None,
    small_block_length: o.SmallBlockLength = None,
    edit_threshold: o.EditThreshold = None,
    max_post_steps: o.MaxPostSteps = None,
    minimal_topk: o.MinimalTopK = None,
    attention: o.Attention = None,
    eviction: o.Eviction = None,
    block_cache: o.BlockCache = None,
    block_commit: o.BlockCommit = None,
    rope_scaling: o.RopeScaling = None,
    eps: o.Eps = None,
    cfg_scale: o.CfgScale = None,
    seed: Seed = 0,
    batch: Annotated[int, typer.Option(help="Prompts decoded together.")] = 8,
    budget: o.Budget = None,
    device: o.Where = "cpu",
    dtype: o.DType = None,
    threads: o.Threads = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Ask a model what it must know: facts at any depth of a document, arithmetic, sorting, stories."""
    check_targets([out])
    settings = ExactSettings(
        tasks=_names(tasks), lengths=parse_lengths(lengths), per_cell=per_cell, per_task=per_task, seed=seed, batch=batch,
        options=o.given(context),
    )  # fmt: skip
    described = trained(scaled(load(model), rope_scaling), model, instead="small, small-sdar")
    if "attention" in settings.options:
        settings.options["attention"].check(described.architecture)  # before the model is loaded
    if "eviction" in settings.options:
        settings.options["eviction"].check(described.architecture, dual=cache == "dual")
    said = _said(described, device)
    dtype = dtype or own_dtype(model, device)
    with compile(described, device=device, budget=budget, dtype=dtype, threads=threads) as compiled:
        result = {**said, **measure_exact(compiled, settings, progress=_scored)}
    report(result, exact_tables, out, as_json)


@app.command()
def policies(
    model: AnyModel = "small-sdar",
    policies: Annotated[
        str,
        typer.Option(
            help="The others are compared with the first: exact,mage:ratio=1/16,quest:k=256:page=8,dc+,"
            "focus:alpha=1.2+dc+; of small exact,dual,sparse:retention=0.2:selection=uniform."
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
    """Compare policies of attention, eviction and caches on the same questions: right answers, forwards, computed tokens."""
    check_targets([out])
    settings = CompareSettings(
        policies=_names(policies), schedules=_names(schedules), tasks=_names(tasks), lengths=parse_lengths(lengths),
        per_cell=per_cell, per_task=per_task, seed=seed, split=split, batch=batch, replay=replay, seconds=seconds,
    )  # fmt: skip
    described = trained(load(model), model, instead="small, small-sdar")
    configurations(settings, described.architecture)  # before the model is loaded
    dtype = dtype or own_dtype(model, device)
    said = {**_said(described, device), "dtype": dtype}

    def keep(document: Result) -> None:
        if out is not None:
            write_atomic(out, json.dumps({**said, **document}, indent=1) + "\n")

    with compile(described, device=device, budget=budget, dtype=dtype, threads=threads) as compiled:
        result = {**said, **compare(compiled, settings, progress=_told, keep=keep)}
    report(result, policies_tables, out, as_json)


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
    _along(model, estimate, settings, estimation_png, estimation_tables, out, plot, as_json)


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
        lengths=parse_lengths(lengths), items=items, seed=seed, options=read_schedule(schedule),
    )  # fmt: skip
    _along(model, measure, settings, decodability_png, decodability_tables, out, plot, as_json)


def _along(
    model: str, measured: Callable[..., dict[str, Any]], settings: Any, picture: Callable[[Result, str], bytes],
    tables: Callable[[Result], Iterator[Table]], out: Path | None, plot: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure a model along its own answers, on a CPU in float32, and write and print the results."""
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


def _said(described: Model, device: str) -> dict[str, Any]:
    """The model, the device and the environment of a measurement."""
    return {
        "model": described.name, "device": device, "card": card(load_device(device).backend == "cuda"),
        "environment": environment(command_line()),
    }  # fmt: skip


def _scored(done: int, total: int, score: Score) -> None:
    """A line on stderr for every wrong answer, and one for every tenth of the way."""
    if not score.exact:
        place = f" of {score.item.length:,} tokens" if score.item.length else ""
        place += f", depth {score.item.depth:.0%}" if score.item.length and score.item.depth is not None else ""
        note(f"{score.item.task}{place}: expected {score.item.result[:60]!r}, got {score.text[-60:]!r}")
    if done == total or done * 10 // total > (done - 1) * 10 // total:
        note(f"{done:,} of {total:,} items")


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


def main() -> None:
    """Run the command that is asked for."""
    run(app)


if __name__ == "__main__":
    main()
