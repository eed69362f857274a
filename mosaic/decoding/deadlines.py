"""When requests of a session end as expired."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mosaic.decoding.live import Early, LiveRequest

__all__ = ["Deadlines"]


class Deadlines:
    """The live requests of a session that have a deadline, by the host's monotonic clock."""

    def __init__(self) -> None:
        self._at_s: dict[LiveRequest, float] = {}
        self._soonest_s = inf

    def add(self, request: LiveRequest) -> None:
        """Note the deadline of a request that begins now, if it has one."""
        if request.deadline_s is not None:
            self._at_s[request] = monotonic() + request.deadline_s
            self._soonest_s = min(self._soonest_s, self._at_s[request])

    def remove(self, request: LiveRequest) -> None:
        """Forget a request, if it is known."""
        self._at_s.pop(request, None)

    def expire(self, end: Callable[[LiveRequest, Early], object]) -> None:
        """End the requests whose deadline has passed, all of them if `end` raises, too."""
        if not self._at_s or (now := monotonic()) < self._soonest_s:
            return
        with ExitStack() as ending:
            for request in [request for request, at in reversed(self._at_s.items()) if at <= now]:
                ending.callback(end, request, "expired")
        self._soonest_s = min(self._at_s.values(), default=inf)
