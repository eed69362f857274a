"""Many sockets at once, in a process of its own: `python server_load.py PORT COUNT PROMPTS.json` prints what each prompt got.

Each caller opens a socket of its own and asks for an answer, every other one streamed. Every third leaves at a random time.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time

LEAVES_WITHIN_S = 20.0


async def ask(port: int, number: int, asked: dict[str, object], rng: random.Random) -> str | None:
    """Ask; return the text of the answer, or None for a caller who left."""
    streamed = number % 2 == 0
    body = json.dumps({**asked, "stream": streamed}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    if number % 3 == 0:
        await asyncio.sleep(rng.random() * LEAVES_WITHIN_S)
        writer.close()
        return None
    found = (await reader.read()).decode()
    writer.close()
    head, _, rest = found.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200"), found[:500]
    if not streamed:
        return str(json.loads(rest)["choices"][0]["text"])
    lines = [line.removeprefix("data: ") for line in rest.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


async def main(port: int, count: int, prompts: list[dict[str, object]]) -> None:
    """Ask them all at once."""
    rng, began = random.Random(1), time.perf_counter()
    texts = await asyncio.gather(*(ask(port, number, prompts[number % len(prompts)], rng) for number in range(count)))
    print(json.dumps({"seconds": time.perf_counter() - began, "texts": texts}))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])))
