"""`mosaic bench serve`: what a server that speaks OpenAI's protocol does under load."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from mosaic.cli.output import json_object, note, print_json, results
from mosaic.errors import UnknownName, UsageError
from mosaic.files import write_atomic

app = typer.Typer(name="bench", help="Measure a server.", no_args_is_help=True)


@app.callback()
def _bench() -> None:
    """Measure a server."""


@app.command()
def serve(
    model: Annotated[str, typer.Option(help="The model's name at the server.")],
    base_url: Annotated[str, typer.Option(help="Of the server.")] = "http://127.0.0.1:8000",
    traffic: Annotated[
        str, typer.Option(help="Lengths: short, long (4,096 in, 1,536 out), livebench, osc or burst.")
    ] = "short",
    trace: Annotated[
        Path | None,
        typer.Option(help="Recorded requests instead: lines of JSON, or a CSV of Azure's or BurstGPT's columns."),
    ] = None,
    input_len: Annotated[
        int | None, typer.Option(min=1, help="Words of each prompt, instead of the traffic's.")
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each answer, instead of the traffic's.")
    ] = None,
    prefix_len: Annotated[int, typer.Option(min=0, help="Words that all prompts begin with.")] = 0,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests; the first ones of a trace.")] = 100,
    request_rate: Annotated[
        float, typer.Option(help="Requests a second, at random times; inf: all at once, or as recorded.")
    ] = math.inf,
    burstiness: Annotated[
        float | None, typer.Option(help="Below 1, arrivals come in bursts; 1 is a Poisson process.")
    ] = None,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests in flight at most: a closed loop.")
    ] = None,
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests that are sent before, not measured.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Ask for chats, not completions.")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Answers have all of their tokens.")] = False,
    extra_body: Annotated[str, typer.Option(help="Further fields of each request, as JSON.")] = "{}",
    goodput: Annotated[
        str, typer.Option(help="Count good requests, in milliseconds: ttft:500,tpot:50,e2el:9000.")
    ] = "",
    timeout: Annotated[float, typer.Option(help="Seconds after which a request has failed.")] = 3600.0,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes that send; one for each 256 requests in flight, if not given.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of lengths, words and times.")] = 0,
    api_key: Annotated[str | None, typer.Option(help="Of the server.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the results, with those of each request, as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw them: a .png or .svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Send requests to a server, and report throughput and latencies under the names of vLLM's bench."""
    from mosaic.bench import TRAFFIC, Load, goal_of, measure
    from mosaic.bench.figures import DETAILS
    from mosaic.cli.load_table import failures, print_load
    from mosaic.viz.load_picture import load_png, load_svg

    if traffic not in TRAFFIC:
        raise UnknownName("traffic", traffic, TRAFFIC)
    lengths = TRAFFIC[traffic]
    if input_len is not None:
        lengths = lengths._replace(prompts=(input_len, input_len))
    if output_len is not None:
        lengths = lengths._replace(answers=(output_len, output_len))
    if burstiness is not None:
        if not burstiness > 0:
            raise UsageError(f"--burstiness is {burstiness}; it must be above 0.")
        lengths = lengths._replace(shape=burstiness)
    body = json_object("--extra-body", extra_body)
    drawers = {".png": load_png, ".svg": load_svg}
    if plot is not None and plot.suffix.lower() not in drawers:
        raise UnknownName("file type", plot.name, drawers, hint="The ending says what to draw.")
    load = Load(
        base_url=base_url.rstrip("/").removesuffix("/v1"), model=model, lengths=lengths, trace=trace, requests=num_prompts,
        rate=request_rate, concurrency=max_concurrency, warmups=num_warmups, prefix=prefix_len, seed=seed, chat=chat, key=api_key,
        timeout_s=timeout, goals=goal_of(goodput), body={**({"ignore_eos": True} if ignore_eos else {}), **body},
        processes=processes,
    )  # fmt: skip
    found = measure(load)
    if save is not None:
        write_atomic(save, json.dumps(found, indent=1) + "\n")
    if as_json:
        print_json({name: value for name, value in found.items() if name not in DETAILS})
    else:
        print_load(results(), found)
    if plot is not None:
        write_atomic(plot, drawers[plot.suffix.lower()](found))
    for line in (*found["notes"], *failures(found)):
        note(line)
    if not found["completed"]:
        raise typer.Exit(1)
