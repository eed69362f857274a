"""A server whose answers a test writes byte by byte, by the prompt; it notes the bodies that it was sent."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def piece(text: str = "", reason: str | None = None, **more: Any) -> bytes:
    """A streamed chunk of a completion."""
    return b"data: " + json.dumps({"choices": [{"text": text, "finish_reason": reason}], **more}).encode() + b"\n\n"


def usage(prompt: int, answer: int) -> bytes:
    """The chunk that counts tokens."""
    counted = {"prompt_tokens": prompt, "completion_tokens": answer}
    return b"data: " + json.dumps({"choices": [], "usage": counted}).encode() + b"\n\n"


def answer(*parts: bytes | float, status: str = "200 OK", kind: str = "text/event-stream") -> list[bytes | float]:
    """An answer that ends with its connection; a number is a pause in seconds."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n"
    return [head.encode(), *parts]


@contextmanager
def scripted(answers: Mapping[str, list[bytes | float]], metrics: list[str]) -> Iterator[tuple[str, list[Any]]]:
    """The URL of a server that answers prompts as told, and `/metrics` with each text in turn, the last one for good."""
    asked: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if head.startswith("GET /metrics"):
                text = metrics.pop(0) if len(metrics) > 1 else metrics[0]
                parts = answer(text.encode(), kind="text/plain")
            else:
                length = next(
                    int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length")
                )
                body = json.loads(await reader.readexactly(length))
                asked.append(body)
                parts = answers[body["prompt"]]
                if "stream_options" in body and "no options" in body["prompt"]:
                    parts = answer(b'{"detail": "stream_options: extra inputs"}', status="422 Unprocessable Entity")
            for part in parts:
                if isinstance(part, bytes):
                    writer.write(part)
                    await writer.drain()
                else:
                    await asyncio.sleep(part)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    loop, started = asyncio.new_event_loop(), threading.Event()
    found: list[int] = []

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        found.append(server.sockets[0].getsockname()[1])
        started.set()
        try:
            await server.serve_forever()
        finally:
            server.close()

    task: list[asyncio.Task[None]] = []

    def run() -> None:
        asyncio.set_event_loop(loop)
        task.append(loop.create_task(main()))
        try:
            loop.run_until_complete(task[0])
        except asyncio.CancelledError:
            others = asyncio.all_tasks(loop)
            for other in others:
                other.cancel()
            loop.run_until_complete(asyncio.gather(*others, return_exceptions=True))
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(10)
    try:
        yield f"http://127.0.0.1:{found[0]}", asked
    finally:
        loop.call_soon_threadsafe(task[0].cancel)
        thread.join(10)
        assert not thread.is_alive()
