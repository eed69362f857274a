"""`mosaic calibrate`: measure the CUDA card of this machine and write the profile that `--device` takes."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mosaic.cli.output import new_table, note, print_json, results
from mosaic.cli.request import require_torch

if TYPE_CHECKING:
    from rich.table import Table

    from mosaic.calibration.measure import Calibration

_TARGET_S: Final = 0.12
_QUICK_TARGET_S: Final = 0.03


def calibrate(
    device_name: Annotated[
        str | None, typer.Option("--device-name", help="Name of the profile; default after the card.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write; default NAME.toml in this directory.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repetitions: seconds, and rougher.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Measure the CUDA card of this machine, in about a minute, and write its profile. Nothing else should run on it."""
    import datetime

    from mosaic.cli.exports import check_targets
    from mosaic.devices import to_toml
    from mosaic.files import write_atomic

    check_targets([out])
    require_torch("calibrating a card")
    from mosaic.calibration.cuda_card import cuda_bench, measure_fixed_part
    from mosaic.calibration.measure import FULL, QUICK
    from mosaic.calibration.measure import calibrate as measure

    bench = cuda_bench(target_s=_QUICK_TARGET_S if quick else _TARGET_S)
    name = device_name or name_of(bench.title)
    target = out or Path(f"{name}.toml")
    check_targets([target])
    made = measure(
        bench, name=name, date=datetime.date.today().isoformat(), fixed_part=measure_fixed_part,
        sizes=QUICK if quick else FULL, progress=lambda what: note(f"measuring {what}"),
    )  # fmt: skip
    write_atomic(target, to_toml(made.device))
    if as_json:
        print_json({"file": str(target), **_plain(made)})
        return
    for table in _tables(made):
        results().print(table)
        results().print()
    for message in made.notes:
        note(message)
    results().print(f"written to {target}: --device {target}", soft_wrap=True)


def name_of(card: str) -> str:
    """Return a profile's name after its card.

    >>> name_of("NVIDIA GeForce RTX 4090"), name_of("NVIDIA H200")
    ('rtx-4090', 'h200')
    """
    words = re.findall(r"[a-z0-9.]+", card.lower())
    return "-".join(word for word in words if word not in ("nvidia", "geforce")) or "card"


def _plain(made: Calibration) -> dict[str, Any]:
    """A calibration as JSON, sizes as text where they are keys."""
    plain = asdict(made)
    return {"device": plain.pop("device"), "measured": plain}


def _tables(made: Calibration) -> list[Table]:
    """GEMM rates by rows and columns with the fused unembedding, attention by size, and single figures."""
    device = made.device
    gemms = new_table(
        "GEMM, TFLOP/s at rows", *[f"{columns:,} columns" for columns in device.gemm_rates], "few rows", "fused head"
    )
    measured = (*device.gemm_rates.values(), device.few_rows_rates, device.unembed_rates)
    for rows in sorted({rows for rates in measured for rows in rates}):
        gemms.add_row(f"{rows:,}", *(_tera(rates.get(rows)) for rates in measured))
    attention = new_table("attention, TFLOP/s at rows x heads", *device.attention_rates)
    for size in sorted({size for rates in device.attention_rates.values() for size in rates}):
        attention.add_row(f"{size:,}", *(_tera(rates.get(size)) for rates in device.attention_rates.values()))
    return [gemms, attention, _figures(made)]


def _figures(made: Calibration) -> Table:
    from mosaic.units import format_bytes

    device = made.device
    table = new_table(device.name, "")
    table.add_row("memory", format_bytes(device.memory_bytes))
    table.add_row("bandwidth", f"{device.bandwidth / 1e9:,.0f} GB/s")
    table.add_row("host link, to the device", f"{made.link_to_device / 1e9:,.1f} GB/s")
    table.add_row("host link, to the host", f"{made.link_to_host / 1e9:,.1f} GB/s")
    table.add_row("launch, captured", f"{made.captured_launch_s * 1e6:.2f} us")
    table.add_row("launch, eager", f"{made.eager_launch_s * 1e6:.2f} us")
    table.add_row("context and modules", format_bytes(device.context_bytes))
    table.add_row("library workspaces", format_bytes(device.library_bytes))
    return table


def _tera(rate: float | None) -> str:
    return "" if rate is None else f"{rate / 1e12:,.1f}"
