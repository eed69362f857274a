"""`mosaic serve`: a model behind OpenAI's protocol."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import resource
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Final

import typer

from mosaic.cli import decoding_options as o
from mosaic.cli.output import json_object
from mosaic.cli.request import own_dtype, require_torch
from mosaic.errors import UnknownName, UsageError

if TYPE_CHECKING:
    from fastapi import FastAPI

_log = logging.getLogger(__name__)
_OTHER_FILES: Final = 64
"""Open files that are no connections."""


def serve(
    model: Annotated[
        str, typer.Argument(help="A checkpoint directory, or small or small-sdar; a preset with random weights.")
    ],
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 for all of this machine's.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 for a free one.")] = 8000,
    load_format: Annotated[
        str,
        typer.Option(
            help="auto, the checkpoint's weights, or dummy, random ones; without a tokenizer, words are tokens then."
        ),
    ] = "auto",
    device: o.Where = "cpu",
    budget: o.Budget = None,
    host_budget: Annotated[str | None, typer.Option(help="Pinned host memory for weights; none if not given.")] = "0",
    dtype: o.DType = None,
    threads: o.Threads = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests that are live at once, at most.")] = 256,
    max_waiting: Annotated[int, typer.Option(min=1, help="Prompts that wait for admission, at most.")] = 1024,
    served_name: Annotated[
        str | None, typer.Option(help="The model's name in requests; a preset's, or its directory's, if not given.")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(envvar="MOSAIC_API_KEY", help="Requests need one of these keys.")
    ] = None,
    max_connections: Annotated[int, typer.Option(min=1, help="Open connections, at most.")] = 4096,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds from a request to the end of its answer, at most.")
    ] = 600.0,
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests have after SIGTERM.")
    ] = 60.0,
    log_format: Annotated[str, typer.Option(help="text or json: how lines of the log are written.")] = "text",
    strict: Annotated[bool, typer.Option("--strict", help="Refuse keys of a body that have no meaning.")] = False,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Presets of caches, sparse attention and eviction that requests may ask for, such as mage, or none; "
            "all if not given."
        ),
    ] = None,
    override_generation_config: Annotated[
        str, typer.Option(help="Options of requests that leave them out, as JSON: '{\"threshold\": 0.9}'.")
    ] = "{}",
    replicas: Annotated[
        int, typer.Option(min=1, help="Engines, each on a card of its own; above 1 they run on Ray Serve.")
    ] = 1,
    warm: Annotated[
        bool | None,
        typer.Option(help="Plan, compile and capture steps before the first request; on a card that is the default."),
    ] = None,
) -> None:
    """Serve a model over HTTP with OpenAI's endpoints, its engine in a process of its own."""
    require_torch("`mosaic serve`")
    from mosaic.decoding.config import GenerationConfig, resolve, with_options
    from mosaic.models import load
    from mosaic.models.policies.block_cache import BLOCK_CACHES
    from mosaic.models.policies.registry import NAMES, PLAIN
    from mosaic.serving.app import create_app, name_of
    from mosaic.serving.connections import Server
    from mosaic.serving.engine import LOAD_FORMATS, EngineOptions
    from mosaic.serving.gate import host_in_url, hosts_of
    from mosaic.serving.logs import FORMATS, configure
    from mosaic.serving.supervisor import EngineFailed, Limits

    if any(not key.strip() or not key.isascii() for key in api_key or ()) or os.environ.get("MOSAIC_API_KEY") == "":
        raise UsageError("--api-key: a key has to have ASCII characters; unset MOSAIC_API_KEY to ask nobody for one.")
    if not (math.isfinite(timeout) and math.isfinite(drain_timeout)):
        raise UsageError("--timeout, --drain-timeout: expected seconds.")
    if log_format not in FORMATS:
        raise UnknownName("log format", log_format, FORMATS)
    if load_format not in LOAD_FORMATS:
        raise UnknownName("load format", load_format, LOAD_FORMATS)
    configure(log_format)
    described = load(model)
    known = sorted({name for names in (*NAMES.values(), *PLAIN.values()) for name in names} | set(BLOCK_CACHES))
    allowed = [name for name in policy or () if name != "none"]
    for name in allowed:
        if name not in known:
            raise UnknownName("policy", name, [*known, "none"])
    base = with_options(GenerationConfig(), json_object("--override-generation-config", override_generation_config))
    resolve(base, described.architecture)
    options = EngineOptions(
        model=model, load_format=load_format, base=base, max_num_seqs=max_num_seqs, warm=warm, log_format=log_format,
        compile={
            "device": device, "budget": budget, "host_budget": host_budget, "dtype": dtype or own_dtype(model, device),
            "threads": threads,
        },
    )  # fmt: skip
    name = served_name or name_of(model, described)
    limits = Limits(
        max_waiting=max_waiting, max_connections=_connections(max_connections), timeout_s=timeout, drain_s=drain_timeout
    )
    try:  # before the model is loaded
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        number = error.errno or 0  # below 0 where a name has no address
        said = os.strerror(number) if number > 0 else error.strerror
        raise UsageError(f"cannot listen on {host}, port {port}: {said}; give another --port or --host.") from None

    async def serving(app: FastAPI) -> None:
        server = Server(app, limits)
        ending = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            await app.state.engine.ready()
        except EngineFailed:
            if not server.should_exit:  # a signal has not ended it
                server.should_exit = True
                await ending
                raise
        else:
            _log.info("serving %s on http://%s:%d", name, host_in_url(host), listening.getsockname()[1])
        await ending

    with listening, ExitStack() as ending:
        engine = None
        if replicas > 1:
            from mosaic.serving.replicas import start_replicas

            engine = ending.enter_context(start_replicas(options, limits, replicas, int(device != "cpu")))
        app = create_app(
            described, name, options, limits, keys=api_key or (), strict=strict, policies=allowed if policy else None,
            hosts=hosts_of(host, listening.getsockname()[0]), engine=engine,
        )  # fmt: skip
        gc.collect()
        gc.freeze()  # a pass over what is imported takes 0.1 s, in which nobody is answered
        asyncio.run(serving(app))


def _connections(wanted: int) -> int:
    """As many connections as are wanted, or as this process may have open files."""
    needed, (soft, hard) = wanted + _OTHER_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < needed:
            _log.warning(
                "%d connections at most: this process may open %d files; raise ulimit -n", soft - _OTHER_FILES, soft
            )
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, soft - _OTHER_FILES)
