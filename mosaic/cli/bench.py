"""`mosaic bench serve`: what a server that speaks OpenAI's protocol does under load."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mosaic.cli.output import note, print_json
from mosaic.errors import UnknownName, UsageError

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
    input_len: Annotated[
        int | None, typer.Option(min=1, help="Words of each prompt, instead of the traffic's.")
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each answer, instead of the traffic's.")
    ] = None,
    prefix_len: Annotated[int, typer.Option(min=0, help="Words that all prompts begin with.")] = 0,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests.")] = 100,
    request_rate: Annotated[float, typer.Option(help="Requests a second, at random times; inf: all at once.")] = float(
        "inf"
    ),
    burstiness: Annotated[
        float | None, typer.Option(help="Below 1, arrivals come in bursts; 1 is a Poisson process.")
    ] = None,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests in flight at most: a closed loop.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask for chats, not completions.")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Answers have all of their tokens.")] = False,
    extra_body: Annotated[str, typer.Option(help="Further fields of each request, as JSON.")] = "{}",
    goodput: Annotated[
        str, typer.Option(help="Count good requests, in milliseconds: ttft:500,tpot:50,e2el:9000.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Of lengths, words and times.")] = 0,
    api_key: Annotated[str | None, typer.Option(help="Of the server.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the results, with those of each request, as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Send requests to a server, and report throughput and latencies under the names of vLLM's bench."""
    from mosaic.serving.load import TRAFFIC, Load, goal_of, measure

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
    try:
        body = json.loads(extra_body)
    except ValueError as error:
        raise UsageError(f"--extra-body is no JSON: {error}.") from None
    if not isinstance(body, dict):
        raise UsageError("--extra-body: expected a JSON object.")
    load = Load(
        base_url=base_url.rstrip("/").removesuffix("/v1"), model=model, lengths=lengths, requests=num_prompts, rate=request_rate,
        concurrency=max_concurrency, prefix=prefix_len, seed=seed, chat=chat, key=api_key, goals=goal_of(goodput),
        body={**({"ignore_eos": True} if ignore_eos else {}), **body},
    )  # fmt: skip
    found = asyncio.run(measure(load))
    found = {
        "traffic": traffic,
        "seed": seed,
        "request_rate": str(request_rate),
        "max_concurrency": max_concurrency,
        **found,
    }
    if save is not None:
        save.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    shown = {name: value for name, value in found.items() if name not in ("details", "errors")}
    if as_json:
        print_json(shown | {"errors": found["errors"][:8]})
        return
    for name, value in shown.items():
        typer.echo(f"{name:<34}{_shown(value):>16}")
    for said in found["errors"][:3]:
        note(said)


def _shown(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
