"""The sockets of a server: how many are open, how long one may keep it waiting, and how all of them end.

uvicorn limits neither how slowly a request comes nor how slowly an answer is read, and dies of the signal that ends it.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Final

from mosaic.errors import MissingExtra

try:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise MissingExtra("uvicorn", "serve", "`mosaic serve`") from error

if TYPE_CHECKING:
    from fastapi import FastAPI

    from mosaic.serving.supervisor import Limits

__all__ = ["Server"]

_KEPT_S: Final = 75
"""Seconds of an open connection without a request: longer than the 60 after which common load balancers take another one."""
_ENDING_S: Final = 5
"""Seconds in which what the engine has ended is sent, before connections are closed."""
_HURRY_S: Final = 1.0
"""The same after a second Ctrl+C."""
_ASKED_S: Final = 1.0
"""Seconds in which whoever has connected as the signal came may ask: a reset would say nothing."""
_LOOK_S: Final = 0.1
_LOOKS: Final = 8


class Server(uvicorn.Server):
    """Serve an application of `create_app` within its limits; a signal ends it as one who asks does, so the exit code is 0.

    Parameters
    ----------
    app, limits
        The application, and the limits it was made with.
    host, port
        Where to listen, if `serve` is given no sockets.
    """

    def __init__(self, app: FastAPI, limits: Limits, *, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__(
            uvicorn.Config(
                app, host=host, port=port, http=_connection(limits), ws="none", log_config=None, access_log=False,
                timeout_keep_alive=_KEPT_S, timeout_graceful_shutdown=round(limits.drain_s) + _ENDING_S,
            )
        )  # fmt: skip
        self._engine, self._drain_s, self._hurries = app.state.engine, limits.drain_s, False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal: the first one drains, a second Ctrl+C does not wait for answers."""
        self._hurries |= self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: Sequence[socket.socket] | None = None) -> None:
        """Listen no more, and wait for the answers; what still runs after `drain_s` gets an error."""
        loop = asyncio.get_running_loop()
        ending, looking = loop.call_later(self._drain_s, self._engine.end), loop.create_task(self._look())
        try:
            await super().shutdown(list(sockets or ()))
        finally:
            ending.cancel()
            looking.cancel()

    async def _look(self) -> None:
        """Tell connections that were accepted while others were told that the server ends. Once somebody hurries, end what still
        runs, and then the connections of who has not read of it."""
        while not self._hurries:
            await asyncio.sleep(_LOOK_S)
            for connection in [*self.server_state.connections]:
                if isinstance(connection, _Connection):
                    connection.see_out()
        self._engine.end()
        await asyncio.sleep(_HURRY_S)
        for connection in [*self.server_state.connections]:
            connection.transport.abort()


class _Connection(H11Protocol):
    """One socket. It is cut off if the head of a request takes longer than `slow_s`, or what was written is not read within it.

    What is written goes out at once. The head of an answer and its first piece are written apart, and callers may acknowledge the
    head only after 40 ms.
    """

    limits: Limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        opened: socket.socket = transport.get_extra_info("socket")
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)  # asyncio leaves out sockets of protocol 0
        if len(self.connections) > self.limits.max_connections:
            self.app_state = {**self.app_state, "crowded": True}
        self._read_s = now = self.loop.time()
        self._asked_s: float | None = now  # since when a request is not whole
        self._look()

    def data_received(self, data: bytes) -> None:
        if self._asked_s is None:
            self._asked_s = self.loop.time()
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._asked_s = None  # the application waits for the body

    def connection_lost(self, exc: Exception | None) -> None:
        self._looking.cancel()
        super().connection_lost(exc)

    def see_out(self) -> None:
        """End after the answer that is given; or now, if nobody has asked anything for a while."""
        if not self.transport.is_closing() and (self.cycle is not None or self._waited_s > _ASKED_S):
            self.shutdown()

    @property
    def _waited_s(self) -> float:
        """Seconds for which a request is not whole."""
        return 0.0 if self._asked_s is None else self.loop.time() - self._asked_s

    def _look(self) -> None:
        now, slow_s = self.loop.time(), self.limits.slow_s
        if not self.transport.get_write_buffer_size():
            self._read_s = now
        if max(now - self._read_s, self._waited_s) > slow_s:
            self.transport.abort()
        else:
            self._looking = self.loop.call_later(slow_s / _LOOKS, self._look)


def _connection(limits: Limits) -> type[_Connection]:
    return type("Connection", (_Connection,), {"limits": limits})
