"""The card that tests in several processes share, and that some of them need to themselves."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def held(lock: Path, *, alone: bool) -> Iterator[None]:
    """Hold the card while no process holds it alone, or while none holds it at all.

    A test that needs it alone waits for current holders, not for later ones, which queue at the gate.
    """
    with open(lock.with_suffix(".gate"), "w") as gate, open(lock, "w") as card:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(card, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
