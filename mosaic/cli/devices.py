"""`mosaic devices`: the built-in profiles, and which of them fit a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mosaic.cli.completion import model_names
from mosaic.cli.output import new_table, print_json, results
from mosaic.cli.request import read_model, read_request
from mosaic.errors import UsageError

if TYPE_CHECKING:
    from mosaic.devices import Device
    from mosaic.models import Model
    from mosaic.planner import Request


def devices(
    fits: Annotated[
        bool, typer.Option("--fits", help="Say which devices hold a request, and with what chunks.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Preset, checkpoint directory or config.json.", autocompletion=model_names)
    ] = None,
    ctx: Annotated[str | None, typer.Option("--ctx", "--tokens", help="Context in tokens, such as 128k.")] = None,
    seq_lens: Annotated[str | None, typer.Option(help="A packed batch instead: lengths such as 4k,32k.")] = None,
    mask_ratio: Annotated[float | None, typer.Option(help="Share of masked tokens, default 0.5.")] = None,
    masked: Annotated[str | None, typer.Option(help="Masked rows as a number.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="Bytes that may be used of each device, such as 24GiB; default all of it.")
    ] = None,
    host_budget: Annotated[
        str | None, typer.Option(help="Pinned host memory for weights and hidden states, such as 64GiB; default none.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Override the checkpoint's dtype.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """List the devices; with --fits, only those that fit the request. Exit code 3 when none fits."""
    request = (model, ctx, seq_lens, mask_ratio, masked, budget, host_budget, dtype)
    if fits:
        rows = _fitting(read_model(model, dtype), read_request(ctx, seq_lens, mask_ratio, masked), budget, host_budget)
    elif any(option is not None for option in request):
        raise UsageError("--model, --ctx and the other options of a request go with --fits.")
    else:
        from mosaic.devices import DEVICES

        rows = [profile(device) for device in DEVICES.values()]
    if as_json:
        print_json(rows)
    else:
        _print(rows)
    if fits and not any(row["fits"] for row in rows):
        raise typer.Exit(3)


def profile(device: Device) -> dict[str, Any]:
    """Return a profile as a row: its sizes, and the best of each of its rates."""
    attention = {name: max(rates.values()) for name, rates in device.attention_rates.items()}
    return {
        "name": device.name, "memory_bytes": device.memory_bytes, "bandwidth_bytes_per_s": device.bandwidth,
        "host_link_bytes_per_s": device.host_link, "gemm_flops": max(max(r.values()) for r in device.gemm_rates.values()),
        "attention_flops": max(attention.values()), "attention_flops_by_implementation": attention,
        "estimated": device.estimated, "source": device.source,
    }  # fmt: skip


def _fitting(model: Model, request: Request, budget: str | None, host_budget: str | None) -> list[dict[str, Any]]:
    from mosaic.devices import DEVICES
    from mosaic.planner.planner import Planner
    from mosaic.units import parse_bytes

    most = None if budget is None else parse_bytes(budget, what="budget")

    rows = []
    for device in DEVICES.values():
        if device.backend != "cuda":
            continue
        available = device.memory_bytes if most is None else min(most, device.memory_bytes)
        planner = Planner(model, device=device, budget=available, host_budget=host_budget)
        plan = planner.plan(request)
        rows.append(
            {
                "name": device.name, "fits": plan.fits, "total_bytes": plan.total_bytes, "memory_bytes": device.memory_bytes,
                "budget_bytes": available, "host_bytes": plan.host_bytes,
                "config": plan.config, "predicted_step_ms": plan.predicted_step_ms, "max_ctx_tokens": plan.max_ctx_tokens,
                "estimated": device.estimated,
            }
        )  # fmt: skip
    return rows


def _print(rows: list[dict[str, Any]]) -> None:
    from mosaic.units import format_bytes, format_seconds, format_tokens

    fitting = "fits" in rows[0]
    if fitting:
        table = new_table(
            "device", "fits", "needs", "may use", "on the host", "largest context", "predicted step", "chunks"
        )
        table.columns[1].justify = "left"
    else:
        table = new_table("device", "memory", "bandwidth", "host link", "GEMM", "attention", "figures")
    table.columns[-1].justify, table.columns[-1].no_wrap = "left", not fitting
    for row in rows:
        if fitting:
            chunks = ", ".join(
                f"{k} {v if isinstance(v, str) else f'{v:,}'}" for k, v in row["config"].items() if v is not None
            )
            step = format_seconds(row["predicted_step_ms"] / 1e3) if row["fits"] else ""
            table.add_row(
                row["name"], "[green]yes[/]" if row["fits"] else "[red]no[/]", format_bytes(row["total_bytes"]),
                format_bytes(row["budget_bytes"]), format_bytes(row["host_bytes"]) if row["host_bytes"] else "",
                format_tokens(row["max_ctx_tokens"]), step, chunks if row["fits"] else "",
            )  # fmt: skip
        else:
            table.add_row(
                row["name"], format_bytes(row["memory_bytes"]), f"{row['bandwidth_bytes_per_s'] / 1e9:,.0f} GB/s",
                f"{row['host_link_bytes_per_s'] / 1e9:,.1f} GB/s",
                f"{row['gemm_flops'] / 1e12:,.0f} TFLOP/s", f"{row['attention_flops'] / 1e12:,.0f} TFLOP/s",
                "estimated" if row["estimated"] else "measured",
            )  # fmt: skip
    results().print(table)
