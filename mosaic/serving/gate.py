"""Whom a server answers: by connection and by key."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mosaic.serving.endings import Ending

if TYPE_CHECKING:
    from fastapi import Request

__all__ = ["Gate"]


class Gate:
    """Turns requests away before anything of them is read.

    Parameters
    ----------
    keys
        One of which a request has to have; none: nobody is asked.
    most_connections
        Open ones; the server marks those beyond it.
    """

    def __init__(self, keys: Sequence[str], most_connections: int) -> None:
        self._keys = [key.encode("latin-1", "replace") for key in keys]
        self._most_connections = most_connections

    def admit(self, request: Request) -> None:
        """Refuse what comes over a connection beyond the limit."""
        if getattr(request.state, "crowded", False):
            said = f"{self._most_connections:,} connections are open, which is as many as may; ask again later."
            raise Ending(503, said, "overloaded_error", {"Connection": "close", "Retry-After": "1"})

    def allow(self, request: Request) -> None:
        """Refuse who has no key, where there are keys."""
        if not self._keys:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not any(
            hmac.compare_digest(given.strip().encode("latin-1", "replace"), key) for key in self._keys
        ):
            raise Ending(401, "no valid API key: send 'Authorization: Bearer KEY'.", "authentication_error")
