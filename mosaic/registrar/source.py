"""The source line of registering code, for messages."""

from __future__ import annotations

import sys


def caller() -> str:
    """Return `file:line` of the registering code: the first frame outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("mosaic.registrar", "contextlib")
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
