"""Whom a server answers: by the name under which it is asked, by connection and by key."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from mosaic.serving.endings import Ending

if TYPE_CHECKING:
    from fastapi import Request

__all__ = ["Gate", "host_in_url", "hosts_of"]

_LOCAL: Final = ("localhost", "127.0.0.1", "[::1]")
_PORT: Final = re.compile(r":[0-9]*$")


def hosts_of(host: str, address: str) -> Sequence[str] | None:
    """Return the names under which a server may be asked that was told to listen on `host`, and does on `address`: on a loopback
    address its own ones, on any other None, all.

    >>> hosts_of("127.0.0.2", "127.0.0.2")
    ('localhost', '127.0.0.1', '[::1]', '127.0.0.2')
    """
    return tuple(dict.fromkeys((*_LOCAL, host_in_url(host.lower())))) if ip_address(address).is_loopback else None


def host_in_url(host: str) -> str:
    """Return a host as URLs have it.

    >>> host_in_url("::1")
    '[::1]'
    """
    return f"[{host}]" if ":" in host else host


class Gate:
    """Turns requests away before anything of them is read.

    Parameters
    ----------
    keys
        One of which a request has to have; none: nobody is asked.
    most_connections
        Open ones; the server marks those beyond it.
    hosts
        What `Host` has to name, with any port, where there are no keys, and `Origin`, if a browser sends it; None: neither is
        looked at. A page of any site can have its name resolve to 127.0.0.1, and would then ask as if it came from here; under
        its own name it can still send what it may not read the answer of, and load the engine.
    """

    def __init__(self, keys: Sequence[str], most_connections: int, hosts: Sequence[str] | None) -> None:
        self._keys = {
            key: hashlib.sha256(key).hexdigest() for key in (one.encode("latin-1", "replace") for one in keys)
        }
        self._most_connections = most_connections
        self._hosts = None if keys else hosts

    def name(self, request: Request) -> None:
        """Refuse what is asked under a name that is not this server's, or by a page of another site."""
        if self._hosts is None:
            return
        own, given = ", ".join(self._hosts), request.headers.get("host", "")
        if not self._names_us(given):
            said = f"the header Host is {given!r}; without API keys this server answers under {own} alone: use one of these names, "
            said += "let a proxy send it as Host, or start the server with --api-key."
            raise Ending(403, said, "permission_error")
        origin = request.headers.get("origin")
        if origin is not None and not self._names_us(origin.partition("://")[2]):
            said = f"the header Origin is {origin!r}; without API keys this server answers pages of {own} alone: open it under "
            said += "one of these names, or start the server with --api-key."
            raise Ending(403, said, "permission_error")

    def _names_us(self, given: str) -> bool:
        return _PORT.sub("", given).lower() in (self._hosts or ())

    def admit(self, request: Request) -> None:
        """Refuse what comes over a connection beyond the limit."""
        if getattr(request.state, "crowded", False):
            said = f"{self._most_connections:,} connections are open, which is as many as may; ask again later."
            raise Ending(503, said, "overloaded_error", {"Connection": "close", "Retry-After": "1"})

    def allow(self, request: Request) -> str:
        """Refuse who has no key, where there are keys; return whose request it is, a digest of the key, or nobody's."""
        if not self._keys:
            return ""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            sent = given.strip().encode("latin-1", "replace")
            for key, digest in self._keys.items():
                if hmac.compare_digest(sent, key):
                    return digest
        raise Ending(401, "no valid API key: send 'Authorization: Bearer KEY'.", "authentication_error")
