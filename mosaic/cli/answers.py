"""What commands share that ask a trained model questions: options, which models they take, and where results go."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from mosaic.cli.output import note, print_json, results
from mosaic.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from mosaic.models import Model
    from mosaic.runtime.compiled import CompiledModel

__all__ = [
    "AsJson",
    "Items",
    "Lengths",
    "ModelName",
    "Out",
    "Plot",
    "Schedule",
    "Seed",
    "check_files",
    "measure_along",
    "said_by",
    "show",
    "split",
    "trained",
    "write_result",
]

ModelName: TypeAlias = Annotated[
    str, typer.Option(help="small-sdar, or a checkpoint directory of examples/train_small.")
]
Lengths: TypeAlias = Annotated[str, typer.Option(help="Contexts.")]
Items: TypeAlias = Annotated[int, typer.Option(help="Answers per task and length.")]
Schedule: TypeAlias = Annotated[str, typer.Option(help="Steps of a block: dynamic, dynamic:threshold=0.95, static:16.")]
Seed: TypeAlias = Annotated[int, typer.Option(help="Of the evaluation set.")]
Out: TypeAlias = Annotated[Path | None, typer.Option(help="Write the results' JSON.")]
Plot: TypeAlias = Annotated[Path | None, typer.Option(help="Write a picture, PNG; needs the extra 'viz'.")]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the results' JSON and nothing else.")]

Result: TypeAlias = Mapping[str, Any]
Measure: TypeAlias = "Callable[[CompiledModel, Callable[[int, int], None]], Result]"


def split(text: str) -> tuple[str, ...]:
    """Return the names that commas separate."""
    return tuple(part.strip() for part in text.split(","))


def check_files(out: Path | None, plot: Path | None) -> None:
    """Refuse what cannot be written, before anything is measured."""
    from mosaic.cli.exports import check_targets

    check_targets([out, plot])
    if plot is not None and plot.suffix != ".png":
        raise UsageError(f"--plot writes PNG, got {plot}: give a name that ends in .png.")


def trained(described: Model, asked: str, *, instead: str = "small-sdar") -> Model:
    """Return a model that has weights and the vocabulary of the questions; refuse others, before they are loaded.

    Parameters
    ----------
    asked
        What was asked for, by name.
    instead
        What to give instead.
    """
    from mosaic.bench.quality.run import check_vocabulary

    if described.path is None:
        raise UsageError(f"{asked} is a preset with random weights: give {instead} or a checkpoint directory.")
    check_vocabulary(Path(described.path))
    return described


def said_by() -> dict[str, Any]:
    """Return the environment of results, with the command that was given."""
    from mosaic.bench.environment import environment

    return environment(shlex.join(["mosaic", *sys.argv[1:]]))


def write_result(result: Result, out: Path | None) -> None:
    """Write the results' JSON, if asked to, whole or not at all."""
    from mosaic.files import write_atomic

    if out is not None:
        write_atomic(out, json.dumps(result, indent=1) + "\n")


def show(
    result: dict[str, Any], tables: Callable[[dict[str, Any]], list[Table]], files: list[Path | None], as_json: bool
) -> None:
    """Say what was written, and print the JSON or the tables."""
    from mosaic.cli.exports import say_written

    say_written(files)
    if as_json:
        print_json(result)
        return
    for table in tables(result):
        results().print(table)
        results().print()


def measure_along(
    model: str, why: str, measure: Measure, picture: Callable[[Result, str], bytes],
    tables: Callable[[dict[str, Any]], list[Table]], *, out: Path | None, plot: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure a model on a CPU in float32, and write and print what was found.

    Parameters
    ----------
    why
        Why a model that attends in both directions is refused.
    measure
        Takes the model, and what is told of answers done and answers in all.
    """
    from mosaic.files import write_atomic
    from mosaic.models import load
    from mosaic.runtime.compile import compile

    described = load(model)
    if described.path is not None and not described.architecture.block:
        raise UsageError(f"{model} attends in both directions: {why}; give small-sdar.")
    with compile(trained(described, model), dtype="float32") as compiled:
        found = measure(compiled, lambda done, total: note(f"{done} of {total} answers"))
    result = {"model": described.name, "card": None, "environment": said_by(), **found}
    write_result(result, out)
    if plot is not None:
        write_atomic(plot, picture(result, described.name))
    show(result, tables, [out, plot], as_json)
