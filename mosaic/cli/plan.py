"""`mosaic plan`: one request to one plan, or two plans side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mosaic.cli.output import note, print_json, results
from mosaic.errors import UsageError

if TYPE_CHECKING:
    from mosaic.planner.plan import Plan
    from mosaic.planner.planner import Planner, Request

__all__ = ["plan"]


def plan(
    model: Annotated[str | None, typer.Option(help="Preset, checkpoint directory or config.json.")] = None,
    ctx: Annotated[
        str | None, typer.Option(help="Context in tokens: 131072, 128k, or auto = the largest that fits.")
    ] = None,
    seq_lens: Annotated[str | None, typer.Option(help="Plan a packed batch: lengths such as 4k,32k.")] = None,
    mask_ratio: Annotated[float | None, typer.Option(help="Share of masked tokens, default 0.5.")] = None,
    masked: Annotated[str | None, typer.Option(help="Masked rows as a number.")] = None,
    device: Annotated[str | None, typer.Option(help="Device profile: a name or my-card.toml.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="Bytes that may be used, such as 24GiB; default all of the device.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Override the checkpoint's dtype.")] = None,
    solver: Annotated[str, typer.Option(help="Offset solver; see `mosaic pack --help`.")] = "auto",
    explain: Annotated[bool, typer.Option(help="Add the peak formula and the search trace.")] = False,
    compare: Annotated[tuple[Path, Path] | None, typer.Option(help="Set two plan files side by side.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan's JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained HTML report.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the timeline and address map as PNG.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto.")] = None,
    snapshot: Annotated[Path | None, typer.Option(help="Write a snapshot for PyTorch's memory_viz.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan's JSON and nothing else.")] = False,
) -> None:
    """Plan one denoising step: every byte, the chunks, the predicted time. Exit code 3 when it does not fit."""
    if compare is not None:
        _compare(compare, as_json)
        return
    from mosaic.cli.exports import export
    from mosaic.devices import DEFAULT_DEVICE
    from mosaic.planner.advice import misfit

    if model is None:
        raise UsageError("give a model: --model llada-8b (see `mosaic models`), or --compare a.json b.json.")
    planner = _planner(model, dtype, device or DEFAULT_DEVICE, budget)
    request = _request(planner, ctx, seq_lens, mask_ratio, masked)
    made = planner.plan(request, solver=solver)
    targets = {"json": out, "html": html, "png": png, "trace": trace, "snapshot": snapshot}
    if device is None and not as_json:
        note(f"no --device given: planning for the built-in {DEFAULT_DEVICE}.")
    if not made.fits:
        _report_misfit(made, misfit(planner, request, made), as_json, explain)
        if any(targets.values()):
            note("nothing written, since the plan does not fit.")
        raise typer.Exit(3)
    export(made.document, targets)
    _report(made, as_json, explain)


def _planner(model: str, dtype: str | None, device: str, budget: str | None) -> Planner:
    from mosaic.models import load
    from mosaic.planner.planner import Planner
    from mosaic.units import parse_bytes

    loaded = load(model)
    if dtype is not None:
        loaded = loaded.with_dtype(dtype)
    planner = Planner(loaded, device=device, budget_bytes=parse_bytes(budget) if budget else None)
    planner.verify_checkpoint()
    return planner


def _request(
    planner: Planner, ctx: str | None, seq_lens: str | None, mask_ratio: float | None, masked: str | None
) -> Request:
    from mosaic.errors import DoesNotFit
    from mosaic.planner.planner import DEFAULT_MASK_RATIO, Request
    from mosaic.units import format_bytes, parse_tokens

    if (ctx is None) == (seq_lens is None):
        raise UsageError("give a context (--ctx 128k, --ctx auto) or the lengths of a batch (--seq-lens 4k,32k).")
    if mask_ratio is not None and masked is not None:
        raise UsageError("give either --mask-ratio or --masked, not both.")
    asked: dict[str, Any] = {
        "mask_ratio": DEFAULT_MASK_RATIO if mask_ratio is None else mask_ratio,
        "masked": None if masked is None else parse_tokens(masked),
    }
    if ctx == "auto":
        probe = Request(seq_lens=(asked["masked"] or 1,), **asked)
        longest = planner.max_context(probe)
        if longest < (asked["masked"] or 1):
            needed = planner.needed(probe)
            raise DoesNotFit(
                f"no context fits: {planner.model.name} needs {format_bytes(needed)} for {probe.tokens:,} tokens, the budget is "
                f"{format_bytes(planner.budget_bytes)}; give --budget {-(-needed // 2**20)}MiB or a larger --device.",
                needed_bytes=needed, available_bytes=planner.budget_bytes,
            )  # fmt: skip
        return Request(seq_lens=(longest,), **asked)
    lengths = (
        [parse_tokens(part) for part in (seq_lens or ctx or "").split(",")] if seq_lens else [parse_tokens(ctx or "")]
    )
    return Request(seq_lens=tuple(lengths), **asked)


def _report(made: Plan, as_json: bool, explain: bool) -> None:
    if as_json:
        print_json(made.document)
        return
    from mosaic.cli.summary import explanation, print_plan

    print_plan(results(), made.document)
    if explain:
        results().print()
        results().print(explanation(made.document))


def _report_misfit(made: Plan, reason: Any, as_json: bool, explain: bool) -> None:
    if as_json:
        print_json({**made.document, "misfit": reason.as_dict()})
        return
    _report(made, False, explain)
    results().print()
    for line in reason.lines():
        results().print(line)


def _compare(files: tuple[Path, Path], as_json: bool) -> None:
    from mosaic.planner.plan import Plan

    plans = [Plan.load(file) for file in files]
    if as_json:
        keys = ("model", "device", "dims", "config", "components", "total_bytes", "budget_bytes", "peak_bytes",
                "lower_bound_bytes", "predicted_step_ms", "max_ctx_tokens", "fits")  # fmt: skip
        print_json({str(file): {key: p.document[key] for key in keys} for file, p in zip(files, plans, strict=True)})
        return
    from mosaic.cli.summary import comparison

    results().print(comparison([p.document for p in plans], [str(file) for file in files]))
