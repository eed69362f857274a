"""`mosaic plan`: one request to one plan, or two plans side by side."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mosaic.cli import decoding_options as o
from mosaic.cli.attention import figures, report_steps, requests_of
from mosaic.cli.completion import device_names, model_names, solver_names
from mosaic.cli.eviction import block_of, cut_of, pays_up_to, report_graphs
from mosaic.cli.eviction import figures as eviction_figures
from mosaic.cli.output import note, print_json, report_plan, results
from mosaic.cli.sparse_keys import figures as cache_figures
from mosaic.cli.sparse_keys import largest_retention
from mosaic.cli.sparse_keys import report_steps as report_cache
from mosaic.cli.sparse_keys import requests_of as requests_of_cache
from mosaic.errors import UsageError

if TYPE_CHECKING:
    from mosaic.planner.plan import Plan


def plan(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="Preset, checkpoint directory or config.json.", autocompletion=model_names)
    ] = None,
    ctx: Annotated[
        str | None,
        typer.Option("--ctx", "--tokens", help="Context in tokens: 131072, 128k, or auto = the largest that fits."),
    ] = None,
    seq_lens: Annotated[str | None, typer.Option(help="Plan a packed batch: lengths such as 4k,32k.")] = None,
    mask_ratio: Annotated[float | None, typer.Option(help="Share of masked tokens, default 0.5.")] = None,
    masked: Annotated[str | None, typer.Option(help="Masked rows as a number.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Device profile: a name or my-card.toml.", autocompletion=device_names)
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Bytes that may be used, such as 24GiB; default all of the device.")
    ] = None,
    host_budget: Annotated[
        str | None, typer.Option(help="Pinned host memory for weights and hidden states, such as 64GiB; default none.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Override the checkpoint's dtype.")] = None,
    solver: Annotated[
        str, typer.Option(help="Offset solver; see `mosaic pack --solver help`.", autocompletion=solver_names)
    ] = "auto",
    cache: o.PlannedCache = None,
    block_length: o.BlockLength = None,
    gen_length: Annotated[int | None, typer.Option(help="Tokens of the answer, with --cache; default 128.")] = None,
    attention: o.Attention = None,
    eviction: o.Eviction = None,
    block_cache: o.BlockCache = None,
    rope_scaling: o.RopeScaling = None,
    batch_invariant: o.BatchInvariant = False,
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
        given = {option.name for option in context.command.params if context.params.get(option.name) != option.default}
        if given - {"compare", "as_json"}:
            raise UsageError("--compare takes two plan files and goes with --json alone.")
        _compare(compare, as_json)
        return
    from mosaic.cli.request import read_model, read_request, scaled
    from mosaic.devices import DEFAULT_DEVICE
    from mosaic.planner.advice import misfit
    from mosaic.planner.planner import Planner
    from mosaic.planner.schedule import scheduled
    from mosaic.planner.template import collector_paused
    from mosaic.units import format_bytes

    policy = _options("attention", attention)
    if policy is not None and (seq_lens, masked, mask_ratio) != (None, None, None):
        raise UsageError(
            "--attention plans a whole block at the end of --ctx; leave --seq-lens, --masked and --mask-ratio out."
        )
    evicting = _options("eviction", eviction)
    if evicting is not None and (masked, mask_ratio) != (None, None):
        raise UsageError("--eviction plans whole blocks; leave --masked and --mask-ratio out.")
    if block_cache is not None and evicting is None:
        raise UsageError("--block-cache goes with --eviction, such as --eviction focus.")
    keeping = _options("cache", cache)
    if keeping is not None and (policy, evicting, seq_lens, masked, mask_ratio) != (None,) * 5:
        raise UsageError(
            "--cache plans a canvas of --ctx; leave --attention, --eviction, --seq-lens, --masked and --mask-ratio out."
        )
    for name, value in (("--block-length", block_length), ("--gen-length", gen_length)):
        if value is not None and keeping is None:
            raise UsageError(f"{name} goes with --cache, such as --cache sparse.")
    targets = {"json": out, "html": html, "png": png, "trace": trace, "snapshot": snapshot}
    if any(targets.values()):
        from mosaic.cli.exports import check_targets, export

        check_targets(targets.values())
    described = scaled(read_model(model, dtype), rope_scaling)
    with collector_paused():  # to the end, or the collector traverses the planner's objects during the output
        planner = Planner(
            described, device=device, budget=budget, host_budget=host_budget, batch_invariant=batch_invariant,
        )  # fmt: skip
        planner.verify_checkpoint()
        steps = {} if policy is None else requests_of(planner, ctx, policy)
        run = {name: step for name, step in steps.items() if name != "exact"}
        if keeping is not None:
            run, times = requests_of_cache(planner, ctx, keeping, block_length, gen_length)
            schedule = scheduled(planner, run, times)
            planner = planner.with_pinned({"stream": schedule.stream}) if schedule.fits else planner
        if evicting is not None:
            evicting.check(described.architecture)
            blocks = run or {"later": block_of(planner, ctx, seq_lens)}
            cut = {name: cut_of(planner, step, evicting, block_cache) for name, step in blocks.items()}
            run = {name: step for name, (_, step) in cut.items()}
        if run:
            short = [step for step in run.values() if not planner.fits(step)]  # what holds the largest holds the others
            request = max(short, key=planner.needed) if short else run.get("later") or run["refresh"]
        else:
            request = read_request(ctx, seq_lens, mask_ratio, masked, auto=planner)
        made = planner.plan(request, solver=solver)
        reason = None if made.fits else misfit(planner, request, made)
        if reason is None and policy is not None:
            others = {name: planner.plan(step, limit=False) for name, step in steps.items()}
        if reason is None and evicting is not None:
            whole, evicted = cut["later"]
            graphs = eviction_figures(planner.plan(whole, limit=False), planner.plans(evicted, limit=False))
        if device is None and not as_json:
            note(f"no --device given: planning for the built-in {DEFAULT_DEVICE}.")
        if planner.budget_bytes > planner.device.memory_bytes:
            note(
                f"the budget of {format_bytes(planner.budget_bytes)} is more than {planner.device.name} has, "
                f"{format_bytes(planner.device.memory_bytes)}."
            )
        if reason is not None:
            kept = (planner, ctx, keeping, block_length, gen_length)
            _report_misfit(made, reason, None if keeping is None else largest_retention(*kept), as_json, explain)
            if any(targets.values()):
                note("nothing written, since the plan does not fit.")
            raise typer.Exit(3)
        if any(targets.values()):
            export(made.document, targets)
        if as_json and run:
            of_steps = {"steps": figures(others)} if policy is not None else {}
            of_graphs = {"graphs": graphs, "eviction_pays_up_to": pays_up_to(graphs)} if evicting is not None else {}
            of_cache = {"steps": cache_figures(schedule)} if keeping is not None else {}
            print_json({**made.document, **of_steps, **of_graphs, **of_cache})
            return
        report_plan(made.document, as_json, explain)
        if policy is not None:
            report_steps(figures(others), policy, described.architecture.block)
        if keeping is not None:
            report_cache(schedule, keeping)
        if evicting is not None:
            report_graphs(graphs, evicting)


def _options(kind: str, text: str | None) -> Any:
    """The parsed options of policies, if any are given; a plan without policies imports none."""
    if text is None:
        return None
    from mosaic.models.policies.registry import options_of

    return options_of(kind, text)


def _report_misfit(made: Plan, reason: Any, retention: float | None, as_json: bool, explain: bool) -> None:
    if as_json:
        of_cache = {} if retention is None else {"largest_retention": retention}
        print_json({**made.document, "misfit": {**asdict(reason), **of_cache}})
        return
    report_plan(made.document, False, explain)
    results().print()
    for line in reason.lines():
        results().print(line)
    if retention is not None:
        results().print(f"largest retention in this budget: {retention or 'none'}")


def _compare(files: tuple[Path, Path], as_json: bool) -> None:
    from mosaic.cli.request import read_plan

    plans = [read_plan(file) for file in files]
    if as_json:
        keys = ("model", "device", "dims", "config", "components", "total_bytes", "budget_bytes", "host_bytes",
                "host_budget_bytes", "peak_bytes", "lower_bound_bytes", "predicted_step_ms", "max_ctx_tokens", "fits")  # fmt: skip
        print_json(
            [
                {"file": str(file), **{key: p.document[key] for key in keys}}
                for file, p in zip(files, plans, strict=True)
            ]
        )
        return
    from mosaic.cli.summary import comparison

    results().print(comparison([p.document for p in plans], [str(file) for file in files]))
