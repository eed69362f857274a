"""The one place that imports numba: inner loops from `kernels`, compiled on demand and cached on disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import FunctionType
from typing import Any

from . import kernels

__all__ = ["available", "compiled"]


@cache
def available() -> bool:
    """True if numba is installed; does not import it."""
    return find_spec("numba") is not None


@cache
def compiled(name: str) -> Callable[..., Any]:
    """Return a function of `kernels` compiled without the GIL; compiled code is kept on disk between processes.

    Functions of `kernels` that it calls are compiled with it.
    """
    import numba

    source: FunctionType = getattr(kernels, name)
    scope = dict(source.__globals__)
    for helper in kernels.HELPERS.get(name, ()):
        scope[helper] = compiled(helper)
    copy = FunctionType(source.__code__, scope, source.__name__, source.__defaults__, source.__closure__)
    copy.__module__, copy.__qualname__ = source.__module__, source.__qualname__
    function: Callable[..., Any] = numba.njit(cache=True, nogil=True)(copy)
    return function
