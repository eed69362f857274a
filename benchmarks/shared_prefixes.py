"""Prefixes that requests of a session share: the time to the first block, many requests over one prefix, and admission."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from benchmarks.at_once import WARMING
from benchmarks.bench.meters import driver_bytes
from benchmarks.served import Meter
from benchmarks.traffic import prompt_of
from mosaic.decoding import GenerationConfig, LiveRequest, Session, Submission
from mosaic.errors import DoesNotFit
from mosaic.models.kept_keys import key_row
from mosaic.models.parts import KV
from mosaic.registrar.dtypes import ITEMSIZE
from mosaic.runtime.compiled import CompiledModel
from mosaic.units import GIB

__all__ = ["ADMITTED", "OWN", "PREFIXES", "prefix_row", "prefixes"]

PASSES: Final = 3
"""Passes whose median a first block takes, after `WARMING` that are not counted."""
OWN: Final = 128
"""Tokens of each request's prompt that are its own."""
ADMITTED: Final = 64
"""Requests of each kind whose admission is timed."""


def prefixes(
    model: CompiledModel, *, long: int, prefix: int, count: int, live: int, answer: int, **more: Any
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Measure with shared prefixes and without.

    Parameters
    ----------
    long
        Tokens of the prompt whose first block is waited for.
    prefix, count
        Tokens that `count` requests share, before `OWN` of their own.
    live
        Requests that are live while others are admitted.
    answer
        Tokens of each answer.
    """
    asked = {"gen_length": answer, "stop_at_eos": False, **more}
    passes = [_first_blocks(model, long, asked) for _ in range(WARMING + PASSES)][WARMING:]
    for place, shares in enumerate((False, True)):
        ms, cached = [found[place][0] for found in passes], passes[0][place][1]
        yield {
            "what": "first block",
            "count": 1,
            "prompt": long,
            "shares": shares,
            "ms": statistics.median(ms),
            "cached": cached,
        }
    for shares in (True, False):
        model.trim()
        try:
            for _ in range(WARMING):
                found = _together(model, count, prefix, asked, shares=shares)
            yield {"what": "together", "count": count, "prompt": prefix + OWN, "shares": shares, **found}
        except DoesNotFit as error:
            print(count, error)
    yield from _admissions(model, live, prefix, asked)


def _first_blocks(model: CompiledModel, long: int, asked: Mapping[str, Any]) -> list[tuple[float, int]]:
    """Milliseconds to the end of the first step that decides, and cached tokens, of a prompt that comes twice to one session."""
    meter, found = Meter(model), list[tuple[float, int]]()
    prompt = prompt_of(model.architecture, long, torch.Generator().manual_seed(long))
    with Session(meter) as session:
        for _ in range(2):
            began, first = time.perf_counter(), len(meter.steps)
            request = session.submit(prompt, **asked)
            while len(meter.steps) == first or meter.steps[-1].prompts:
                session.advance()
            ms = 1e3 * (time.perf_counter() - began)
            while session.live:
                session.advance()
            assert request.generation is not None
            found.append((ms, request.generation.cached_tokens))
    return found


def _prompts(model: CompiledModel, count: int, prefix: int, *, shares: bool) -> list[torch.Tensor]:
    arch, generator = model.architecture, torch.Generator().manual_seed(count)
    first = prompt_of(arch, prefix, generator)
    return [
        torch.cat([first if shares else prompt_of(arch, prefix, generator), prompt_of(arch, OWN, generator)])
        for _ in range(count)
    ]


def _together(
    model: CompiledModel, count: int, prefix: int, asked: Mapping[str, Any], *, shares: bool
) -> dict[str, Any]:  # fmt: skip
    """Serve requests that are submitted together; return their speed and what their keys take."""
    prompts, rows = _prompts(model, count, prefix, shares=shares), 0
    arch = model.architecture
    with Session(model) as session:
        began = time.perf_counter()
        requests = [session.submit(prompt, **asked) for prompt in prompts]
        rows = model.state_rows[KV.name]
        while session.live:
            session.advance()
        seconds = time.perf_counter() - began
        done = [request.generation for request in requests if request.generation is not None]
    return {
        "ms": 1e3 * seconds, "tokens_per_s": sum(len(one.token_ids) for one in done) / seconds, "rows": rows,
        "keys_bytes": rows * key_row(arch).columns * ITEMSIZE[KV.dtype_in(arch)],
        "cached": statistics.median(one.cached_tokens for one in done), "driver_bytes": driver_bytes(model.asynchronous),
    }  # fmt: skip


def _admissions(model: CompiledModel, live: int, prefix: int, asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Time `admits`, and `submit` with the rows that it takes, beside live requests."""
    arch, generator = model.architecture, torch.Generator().manual_seed(live)
    with Session(model) as session:
        prompts = _prompts(model, live, prefix, shares=True)
        running: list[LiveRequest] = []
        try:
            running += [session.submit(prompt, **asked) for prompt in prompts]
        except DoesNotFit as error:
            print(f"{len(running)} are live, not {live}: {error}")
        while any(request.steps == 0 for request in running):
            session.advance()
        for shares in (True, False):
            admitted, submitted = list[float](), list[float]()
            for _ in range(ADMITTED):
                first = prompts[0][:prefix] if shares else prompt_of(arch, prefix, generator)
                asks = Submission(
                    prompt=torch.cat([first, prompt_of(arch, OWN, generator)]), config=GenerationConfig(**asked)
                )
                began = time.perf_counter()
                fits = session.admits(asks)
                admitted.append(time.perf_counter() - began)
                if fits:
                    began = time.perf_counter()
                    (request,) = session.submit_all([asks])
                    submitted.append(time.perf_counter() - began)
                    session.cancel(request)
            yield {
                "what": "admission", "count": len(running), "prompt": prefix + OWN, "shares": shares,
                "admits_us": 1e6 * statistics.median(admitted),
                "submit_us": 1e6 * statistics.median(submitted) if submitted else None,
            }  # fmt: skip


PREFIXES: Final = (
    "measured", "requests", "tokens of a prompt", "prefix", "cached", "ms", "tokens/s", "rows of keys", "GiB of keys",
    "GiB by the driver", "admits, us", "submit, us",
)  # fmt: skip


def prefix_row(point: Mapping[str, Any]) -> list[str]:
    """Return a point's row of the table."""

    def shown(name: str, form: str, unit: float = 1) -> str:
        return "" if point.get(name) is None else format(point[name] / unit, form)

    return [
        point["what"], f"{point['count']:,}", f"{point['prompt']:,}", "shared" if point["shares"] else "none",
        shown("cached", ",.0f"), shown("ms", ",.1f"), shown("tokens_per_s", ",.0f"), shown("rows", ",.0f"),
        shown("keys_bytes", ".2f", GIB), shown("driver_bytes", ".2f", GIB), shown("admits_us", ".0f"), shown("submit_us", ".0f"),
    ]  # fmt: skip
