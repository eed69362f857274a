"""A line on stderr while templates are compiled, in a terminal alone."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mosaic.planner.planner import Progress

__all__ = ["compiling"]

_CLEAR = "\r\x1b[K"


@contextmanager
def compiling() -> Iterator[Progress | None]:
    """What to give a `Planner` as its `progress`: it draws one line and takes it away; None where there is no terminal."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield None
        return
    began, active = time.perf_counter(), True

    def draw(done: int, name: str) -> None:
        if active:
            seconds = time.perf_counter() - began
            what = f"mosaic: planning this model for the first time, {done:,} bodies compiled ({seconds:.0f} s), {name}"
            sys.stderr.write(f"{_CLEAR}{what[: _columns()]}")
            sys.stderr.flush()

    try:
        yield draw
    finally:
        active = False
        sys.stderr.write(_CLEAR)
        sys.stderr.flush()


def _columns() -> int:
    """Characters that fit one line: a line that wraps could not be taken away."""
    try:
        return max(os.get_terminal_size(sys.stderr.fileno()).columns - 1, 20)
    except (OSError, ValueError):
        return 79
