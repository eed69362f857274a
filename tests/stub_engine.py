"""An engine's process without a model: it answers prompts when so many have come, all in one message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mosaic.serving.messages import Asked, Ended, Fresh, Ready, Stepped

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from mosaic.serving import EngineOptions

__all__ = ["TOGETHER", "run_stub"]

TOGETHER = 64


def run_stub(_: EngineOptions, connection: Connection) -> None:
    """Serve until the connection says that it ends."""
    connection.send([Ready(longest=4096)])
    asked = list[Asked]()
    while True:
        for message in connection.recv():
            if message is None:
                return
            if isinstance(message, Asked):
                asked.append(message)
        if len(asked) == TOGETHER:
            fresh = {one.number: {0: Fresh([*one.prompt], steps=1)} for one in asked}
            ends = [Ended(number=one.number, finishes=["length"], steps=[1]) for one in asked]
            state = Stepped(
                fresh=fresh, seconds=0.1, waiting=0, running=0, newest=asked[-1].number, memory={}, components={}, keys_used=0.0
            )  # fmt: skip
            connection.send([state, *ends])
            asked.clear()
