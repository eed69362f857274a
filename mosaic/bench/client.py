"""One process of a load: sends its requests when they are due, and times the pieces of the answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from mosaic.bench.traffic import Asked, Load, asked
from mosaic.errors import MissingExtra

try:
    import aiohttp
except ImportError as error:
    raise MissingExtra("aiohttp", "serve", "`mosaic bench serve`") from error

__all__ = ["Client", "Outcome", "connected"]

_LONGEST: Final = 1 << 20
"""Bytes of a line, at most: what is longer is no piece of an answer."""


@dataclass(slots=True)
class Outcome:
    """What came of a request.

    Parameters
    ----------
    number
        Of the request.
    due_s, began_s
        When it came, and when it was sent, in seconds from the beginning of the load.
    ttft_s, latency_s
        Seconds from its sending to its first piece, and to its last. A piece has text, or is the last one.
    gaps_s
        Seconds between its pieces.
    prompt_tokens, tokens, cached_tokens
        As the server counts them. If it does not (`counted` is false), words of the prompt, and pieces.
    error
        Why it has failed; empty if it has not.
    """

    number: int
    due_s: float
    began_s: float = 0.0
    ttft_s: float = 0.0
    latency_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    counted: bool = False
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Seconds of each token behind the first."""
        return (self.latency_s - self.ttft_s) / (self.tokens - 1) if self.tokens > 1 else None


class _Failed(Exception):
    """The server says that an answer has failed, or says what is no answer."""


@asynccontextmanager
async def connected(load: Load) -> AsyncIterator[aiohttp.ClientSession]:
    """A session that opens as many connections as there are requests in flight."""
    headers = {} if load.key is None else {"Authorization": f"Bearer {load.key}"}
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=load.timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        yield session


class Client:
    """Sends requests of a load.

    Attributes
    ----------
    counts
        Whether the server takes `stream_options`, by which it is asked to count tokens; as long as it has not refused them, true.
    """

    def __init__(self, session: aiohttp.ClientSession, load: Load) -> None:
        self._session, self._load = session, load
        self.counts = True

    async def send_all(self, began: float, concurrency: int, part: int, parts: int) -> list[Outcome]:
        """Send a part of the load, whose clock (`time.perf_counter`) began at `began`; at most so many at once."""
        gate = asyncio.Semaphore(concurrency)
        tasks: list[asyncio.Task[Outcome]] = []
        for one in asked(self._load, part, parts):
            if (early := began + one.at_s - time.perf_counter()) > 0:
                await asyncio.sleep(early)
            await gate.acquire()
            tasks.append(asyncio.create_task(self.send(one, began)))
            tasks[-1].add_done_callback(lambda _: gate.release())
        return await asyncio.gather(*tasks)

    async def send(self, one: Asked, began: float) -> Outcome:
        """Send a request, and read its answer."""
        found = Outcome(one.number, one.at_s)
        try:
            if not await self._try(one, found, began):
                await self._try(one, found, began)
        except TimeoutError:
            found.error = f"no whole answer within {self._load.timeout_s:g} s"
        except (aiohttp.ClientError, OSError, _Failed) as error:
            found.error = f"{type(error).__name__}: {error}".removeprefix("_Failed: ")
        if not found.counted:
            found.prompt_tokens = len(one.prompt.split() if isinstance(one.prompt, str) else one.prompt)
        return found

    async def _try(self, one: Asked, found: Outcome, began: float) -> bool:
        """Send a request; false if only `stream_options` stood in the way, which are left out from now on."""
        load, counts = self._load, self.counts
        body: dict[str, Any] = {"model": load.model, "max_tokens": one.tokens, "temperature": 0.0, "stream": True}
        body |= {"messages": [{"role": "user", "content": one.prompt}]} if load.chat else {"prompt": one.prompt}
        if counts:
            body["stream_options"] = {"include_usage": True}
        path = "chat/completions" if load.chat else "completions"
        sent = time.perf_counter()
        found.began_s = sent - began
        async with self._session.post(f"{load.base_url}/v1/{path}", json=body | {**load.body, **one.body}) as response:
            if response.status != 200:
                text = (await response.content.read(4096)).decode(errors="replace")
                if counts and response.status in (400, 422) and "stream_options" in text:
                    self.counts = False
                    return False
                raise _Failed(f"status {response.status}: {text[:500]}")
            await _Reading(found, sent).read(response)
        return True


class _Reading:
    """Reads an answer into its outcome."""

    def __init__(self, found: Outcome, sent: float) -> None:
        self._found, self._sent = found, sent
        self._last, self._pieces, self._ended = sent, 0, False

    async def read(self, response: aiohttp.ClientResponse) -> None:
        """Read to the end of the answer; what does not stream is one piece."""
        if response.content_type == "application/json":
            self._take(await response.read())
        else:
            await self._read_stream(response)
        if not self._ended:
            raise _Failed("the answer broke off" if self._pieces else "the answer has no piece")
        if not self._found.counted:
            self._found.tokens = self._pieces

    async def _read_stream(self, response: aiohttp.ClientResponse) -> None:
        rest = b""
        async for data in response.content.iter_any():
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    self._take(line[5:].strip())
            if len(rest) > _LONGEST:
                raise _Failed(f"a line of more than {_LONGEST:,} bytes")

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._ended = True
            return
        try:
            piece = json.loads(data)
            if error := piece.get("error"):
                raise _Failed(str(error.get("message", error) if isinstance(error, dict) else error))
            if usage := piece.get("usage"):
                self._count(usage)
            choices = piece.get("choices") or ()
            texts = [text for choice in choices if (text := _text(choice)) or choice.get("finish_reason")]
            self._ended |= any(choice.get("finish_reason") for choice in choices)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            raise _Failed(f"no piece of an answer: {data[:80].decode(errors='replace')}") from None
        if texts:
            self._time(any(texts))

    def _count(self, usage: dict[str, Any]) -> None:
        found = self._found
        found.prompt_tokens, found.tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        found.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        found.counted = True

    def _time(self, has_text: bool) -> None:
        found, now = self._found, time.perf_counter()
        if found.ttft_s:
            found.gaps_s.append(now - self._last)
        else:
            found.ttft_s = now - self._sent
        self._last, found.latency_s = now, now - self._sent
        self._pieces += has_text


def _text(choice: dict[str, Any]) -> str:
    """The text of a choice of either endpoint, streamed or whole; of a model that reasons, that too."""
    said = choice.get("delta") or choice.get("message") or choice
    return str(said.get("content") or said.get("reasoning_content") or said.get("reasoning") or said.get("text") or "")
