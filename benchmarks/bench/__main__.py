"""Eager PyTorch, `torch.compile` and Mosaic side by side, each in a process of its own.

python -m benchmarks.bench --model llada-8b --ctx 1k,4k,16k --device h200
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from benchmarks import bench
from benchmarks.bench import Settings
from benchmarks.record import command_line
from mosaic.cli import main as run
from mosaic.cli.exports import check_targets, report
from mosaic.cli.output import new_table, note
from mosaic.devices import load_device
from mosaic.errors import UsageError
from mosaic.models import load
from mosaic.units import parse_lengths

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["main"]


app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def measure(
    model: Annotated[str | None, typer.Option(help="Preset (random weights) or checkpoint directory.")] = None,
    ctx: Annotated[str, typer.Option("--ctx", "--tokens", help="Contexts in tokens: 1k,4k,32k.")] = "1k,4k,16k",
    mask_ratio: Annotated[str, typer.Option(help="Shares of masked tokens: 0.1,0.5,0.9.")] = "0.5",
    engines: Annotated[str, typer.Option(help="Of mosaic, eager, compile; in this order, one after the other.")] = (
        "mosaic,eager,compile"
    ),
    device: Annotated[str | None, typer.Option(help="Device profile of this machine's card, or cpu.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Override the checkpoint's dtype.")] = None,
    budget: Annotated[str | None, typer.Option(help="Bytes that Mosaic may take, such as 24GiB.")] = None,
    host_budget: Annotated[str | None, typer.Option(help="Pinned host memory that Mosaic may take.")] = None,
    repeats: Annotated[int, typer.Option(help="Counted steps per point; the median is shown.")] = 5,
    minutes: Annotated[float | None, typer.Option(help="Minutes to stop after; what was measured is kept.")] = None,
    seed: Annotated[int, typer.Option(help="Of random weights and inputs.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the results' JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results' JSON and nothing else.")] = False,
) -> None:
    """Measure steps side by side: latency, and memory by four counters. Exit code 1 when an engine failed."""
    if model is None:
        raise UsageError("give a model: --model llada-8b (see `mosaic models`).")
    if device is None:
        raise UsageError(
            "give the profile of this machine's card, --device h200 (see `mosaic devices`), or --device cpu."
        )
    check_targets([out])
    settings = Settings(
        model=model,
        device=device,
        contexts=parse_lengths(ctx),
        mask_ratios=tuple(_ratio(part) for part in mask_ratio.split(",")),
        engines=tuple(part.strip() for part in engines.split(",")),
        dtype=dtype,
        budget=budget,
        host_budget=host_budget,
        repeats=repeats,
        seed=seed,
    )
    _check(settings.model, settings.device)
    result = bench.run(
        settings, command=command_line(), progress=_progress, deadline_s=None if minutes is None else 60 * minutes
    )
    report(result, tables, out, as_json)
    if not result["complete"]:
        raise typer.Exit(1)


def _ratio(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"cannot read the mask ratio '{text}': write a share such as 0.5.") from None


def _check(model: str, device: str) -> None:
    """Refuse unknown names here, in one line, instead of in every worker."""
    load_device(device)
    load(model)


def _progress(record: dict[str, Any]) -> None:
    """A line on stderr for every point."""
    if "failed" in record:
        shown = record["failed"] or f"{record['step_s'] * 1e3:,.2f} ms"
        note(f"{record['engine']}, {record['tokens']:,} tokens, {record['mask_ratio']:g} masked: {shown}")
    elif "message" in record:
        note(f"{record['engine']} failed: {record['message']}")


_COLUMNS: Final[tuple[tuple[str, Callable[[dict[str, Any]], str]], ...]] = (
    ("engine", lambda p: str(p["engine"])),
    ("tokens", lambda p: f"{p['tokens']:,}"),
    ("masked", lambda p: f"{p['mask_ratio']:g}"),
    ("step ms", lambda p: _milliseconds(p["step_s"]) or str(p["failed"]).split(":")[0]),
    ("predicted", lambda p: _milliseconds(p.get("predicted_s"))),
    ("activations", lambda p: _mib(p.get("activation_peak_bytes"))),
    ("reserved", lambda p: _mib(p.get("reserved_bytes"))),
    ("device MiB", lambda p: _mib(p.get("driver_bytes"))),
    ("inflation", lambda p: _number(p.get("inflation"), ".1%")),
    ("= eager", lambda p: _number(p.get("agrees_with_eager"), ".0%")),
)
"""Times in milliseconds; activations, what PyTorch's allocator reserved and what the driver shows in MiB."""


def tables(result: dict[str, Any]) -> list[Table]:
    """Return the results as people read them: every point; columns that would be empty are left out."""
    cells = [[show(point) for _, show in _COLUMNS] for point in result["points"]]
    shown = [index for index in range(len(_COLUMNS)) if index < 4 or any(row[index] for row in cells)]
    table = new_table(*(_COLUMNS[index][0] for index in shown))
    for row in cells:
        table.add_row(*(row[index] for index in shown))
    return [table]


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.2f}"


def _mib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / (1 << 20):,.1f}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def main() -> None:
    """Run the command."""
    run(app)


if __name__ == "__main__":
    main()
