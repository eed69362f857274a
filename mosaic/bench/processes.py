"""A load from processes of its own, by one clock, beside a watch over the server's memory."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from mosaic.bench.client import Client, Outcome, connected
from mosaic.bench.counters import Counters, counters, growth
from mosaic.bench.figures import results
from mosaic.bench.traffic import Load, asked, size
from mosaic.errors import MosaicError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import aiohttp

__all__ = ["measure"]

_STREAMS: Final = 32
"""Requests in flight for each process, if the machine has the cores: one that sends more at once is slower than a server."""
_SAMPLED_S: Final = 1.0
_HEADSTART_S: Final = 0.05


def measure(load: Load) -> dict[str, Any]:
    """Send a load, and return its results: those of `results`, of `growth`, and `memory`, the server's bytes over time.

    Raises
    ------
    MosaicError
        If the server cannot be reached, a warm-up request fails, or a process that sends ends early.
    UsageError
        If a trace cannot be read.
    """
    return asyncio.run(_measure(load))


async def _measure(load: Load) -> dict[str, Any]:
    total = size(load)
    most = min(load.concurrency or total, total)
    parts = min(load.processes or min(-(-most // _STREAMS), os.cpu_count() or 1), most)
    senders = [_Sender(load, part, parts, most // parts + (part < most % parts)) for part in range(parts)]
    try:
        async with connected(load) as session:
            await counters(session, load)  # is there a server?
            await _warm(session, load, most)
            await _heard(senders)
            before = await counters(session, load)
            began = time.perf_counter() + _HEADSTART_S
            for sender in senders:
                sender.tell(began)
            samples: list[tuple[float, Counters]] = []
            watch = asyncio.create_task(_watch(session, load, began, samples))
            told = await _heard(senders)
            watch.cancel()
            after = await counters(session, load)
            samples.append((time.perf_counter() - began, after))
    finally:
        for sender in senders:
            sender.end()
    outcomes = sorted((one for part in told for one in part[0]), key=lambda one: one.number)
    counts, seconds = all(part[1] for part in told), max(part[2] for part in told) - began
    return results(load, outcomes, seconds, counts) | growth(before, after, seconds) | _memory(samples)


async def _heard(senders: Sequence[_Sender]) -> list[Any]:
    return await asyncio.to_thread(lambda: [sender.hear() for sender in senders])


async def _warm(session: aiohttp.ClientSession, load: Load, most: int) -> None:
    client, first, gate = Client(session, load), next(asked(load)), asyncio.Semaphore(most)

    async def send() -> Outcome:
        async with gate:
            return await client.send(first, time.perf_counter())

    for found in await asyncio.gather(*(send() for _ in range(load.warmups))):
        if found.error:
            raise MosaicError(f"a warm-up request has failed: {found.error}")


async def _watch(
    session: aiohttp.ClientSession, load: Load, began: float, samples: list[tuple[float, Counters]]
) -> None:  # fmt: skip
    while True:
        found = await counters(session, load)
        samples.append((time.perf_counter() - began, found))
        await asyncio.sleep(_SAMPLED_S)


def _memory(samples: Sequence[tuple[float, Counters]]) -> dict[str, Any]:
    samples = [(at, found) for at, found in samples if found.memory]  # a server knows it from its first step on
    if not samples:
        return {}
    series: dict[str, dict[str, list[float]]] = {}
    for kind in ("planned", "committed"):
        pools = sorted({pool for _, found in samples for pool in found.memory.get(kind, {})})
        series[kind] = {
            pool: [found.memory.get(kind, {}).get(pool, 0.0) for _, found in samples] for pool in pools
        }  # fmt: skip
    peak = max(map(sum, zip(*series["committed"].values(), strict=True)), default=0.0)
    return {"peak_memory_bytes": round(peak), "memory": {"times_s": [at for at, _ in samples], **series}}


class _Sender:
    """A process that sends a part of a load."""

    def __init__(self, load: Load, part: int, parts: int, concurrency: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_send, args=(load, part, parts, concurrency, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def hear(self) -> Any:
        """Wait for what it says next: that it is ready, then its outcomes, whether the server counts
        tokens, and when it was done."""
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise MosaicError(f"a process that sends ended early, by code {self._process.exitcode}.") from None

    def tell(self, began: float) -> None:
        """Say when the load begins, by `time.perf_counter`, the same clock in all processes."""
        self._connection.send(began)

    def end(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()
        self._connection.close()


def _send(load: Load, part: int, parts: int, concurrency: int, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process ends this one
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each request has a socket
    asyncio.run(_send_part(load, part, parts, concurrency, connection))


async def _send_part(load: Load, part: int, parts: int, concurrency: int, connection: Connection) -> None:
    async with connected(load) as session:
        client = Client(session, load)
        connection.send(None)
        outcomes = await client.send_all(connection.recv(), concurrency, part, parts)
        connection.send((outcomes, client.counts, time.perf_counter()))
