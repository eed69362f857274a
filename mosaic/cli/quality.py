"""`mosaic bench quality`: exact match by task, length and depth, for any decoding configuration."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mosaic.cli import decoding_options as o
from mosaic.cli.output import new_table, note
from mosaic.cli.request import own_dtype, require_torch, scaled

if TYPE_CHECKING:
    from rich.table import Table

    from mosaic.bench.quality.scoring import Score

__all__ = ["quality"]


def quality(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(help="small, small-sdar, or a checkpoint directory of examples/train_small.")
    ] = "small",
    tasks: Annotated[
        str,
        typer.Option(
            help="Of retrieval, pair, addition, subtraction, multiplication, sorting, story; listing, chain, passage, frequent."
        ),
    ] = "retrieval,pair,addition,subtraction,multiplication,sorting,story",
    lengths: Annotated[str, typer.Option(help="Contexts of the retrieval tasks.")] = "256,512,1k,2k",
    per_cell: Annotated[int, typer.Option(help="Retrieval items per length and tenth of depth.")] = 1,
    per_task: Annotated[int, typer.Option(help="Items of every other task.")] = 20,
    gen_length: Annotated[int | None, typer.Option(help="Tokens to generate; what each task needs by default.")] = None,
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
    ahead: o.Ahead = None,
    attention: o.Attention = None,
    k: o.K = None,
    page: o.Page = None,
    exact_layers: o.ExactLayers = None,
    reuse_steps: o.ReuseSteps = None,
    reuse_change: o.ReuseChange = None,
    eviction: o.Eviction = None,
    alpha: o.Alpha = None,
    block_cache: o.BlockCache = None,
    block_commit: o.BlockCommit = None,
    rope_scaling: o.RopeScaling = None,
    eps: o.Eps = None,
    cfg_scale: o.CfgScale = None,
    seed: Annotated[int, typer.Option(help="Of the evaluation set and of sampling.")] = 0,
    batch: Annotated[int, typer.Option(help="Prompts decoded together.")] = 8,
    budget: o.Budget = None,
    device: o.Where = "cpu",
    dtype: o.DType = None,
    threads: o.Threads = None,
    out: Annotated[Path | None, typer.Option(help="Write the results' JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results' JSON and nothing else.")] = False,
) -> None:
    """Ask a model what it must know: facts at any depth of a document, arithmetic, sorting, stories."""
    from mosaic.bench.quality.run import QualitySettings, run, trained
    from mosaic.cli.exports import check_targets, report
    from mosaic.models import load
    from mosaic.units import parse_lengths

    check_targets([out])
    require_torch("`mosaic bench quality`")
    settings = QualitySettings(
        tasks=tuple(part.strip() for part in tasks.split(",")),
        lengths=parse_lengths(lengths),
        per_cell=per_cell,
        per_task=per_task,
        seed=seed,
        batch=batch,
        options=o.given(context),
    )
    described = trained(scaled(load(model), rope_scaling), model, instead="small, small-sdar")
    if "attention" in settings.options:
        settings.options["attention"].check(described.architecture)  # before the model is loaded
    if "eviction" in settings.options:
        settings.options["eviction"].check(described.architecture, dual=cache == "dual")

    from mosaic.bench.environment import environment
    from mosaic.bench.meters import card
    from mosaic.devices import load_device
    from mosaic.runtime.compile import compile

    where = card(load_device(device).backend == "cuda")
    dtype = dtype or own_dtype(model, device)
    with compile(described, device=device, budget=budget, dtype=dtype, threads=threads) as compiled:
        result = {
            "model": described.name, "device": device, "card": where,
            "environment": environment(shlex.join(["mosaic", *sys.argv[1:]])),
            **run(compiled, settings, progress=_progress),
        }  # fmt: skip
    report(result, tables, out, as_json)


def _progress(done: int, total: int, score: Score) -> None:
    """A line on stderr for every wrong answer, and one for every tenth of the way."""
    if not score.exact:
        place = f" of {score.item.length:,} tokens" if score.item.length else ""
        place += f", depth {score.item.depth:.0%}" if score.item.length and score.item.depth is not None else ""
        note(f"{score.item.task}{place}: expected {score.item.result[:60]!r}, got {score.text[-60:]!r}")
    if done == total or done * 10 // total > (done - 1) * 10 // total:
        note(f"{done:,} of {total:,} items")


def tables(result: dict[str, Any]) -> list[Table]:
    """Return exact match by task, and of the retrieval tasks by length and by depth."""
    by_task = new_table("task", "exact", "with working", "items")
    for task, share in result["by_task"].items():
        by_task.add_row(task, f"{share['exact']:.1%}", f"{share['whole']:.1%}", f"{share['count']:,}")
    found = [by_task]
    for name, groups in (("length", result["by_length"]), ("depth", result["by_depth"])):
        if keys := sorted({key for shares in groups.values() for key in shares}, key=float):
            shown = (f"{int(key):,}" if name == "length" else f"{float(key):.0%}" for key in keys)
            table = new_table(f"exact by {name}", *shown)
            for task, shares in groups.items():
                table.add_row(task, *(f"{shares[key]['exact']:.1%}" if key in shares else "" for key in keys))
            found.append(table)
    return found
