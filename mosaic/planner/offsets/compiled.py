"""The one place that imports numba: inner loops that only index, compiled on demand and cached on disk."""

from __future__ import annotations

import dis
import hashlib
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import FunctionType
from typing import Any

_PACKAGE = __name__.rpartition(".")[0]


@cache
def available() -> bool:
    """Return whether numba is installed, without importing it."""
    return find_spec("numba") is not None


@cache
def compiled(source: FunctionType) -> Callable[..., Any]:
    """Return a plain function compiled without the GIL; compiled code is kept on disk between processes.

    Functions of this package that it calls by their global names are compiled with it.
    """
    import numba

    scope = dict(source.__globals__)
    helpers = {name: compiled(helper) for name, helper in _helpers(source)}
    copy = FunctionType(source.__code__, scope | helpers, source.__name__, source.__defaults__, source.__closure__)
    copy.__module__, copy.__qualname__ = source.__module__, f"{source.__qualname__}_{_digest(source)}"
    function: Callable[..., Any] = numba.njit(cache=True, nogil=True)(copy)
    return function


def _helpers(source: FunctionType) -> list[tuple[str, FunctionType]]:
    """Return the functions of this package that a function calls, by name."""
    return [(n, f) for n, f in _globals(source) if isinstance(f, FunctionType) and f.__module__.startswith(_PACKAGE)]


def _globals(source: FunctionType) -> list[tuple[str, Any]]:
    """Return the global names that a function reads, with their values; builtins are left out."""
    names = sorted({str(i.argval) for i in dis.get_instructions(source) if i.opname == "LOAD_GLOBAL"})
    return [(name, source.__globals__[name]) for name in names if name in source.__globals__]


@cache
def _digest(source: FunctionType) -> str:
    """Return a hash of all that is compiled with a function, so that old compiled code is never taken for new.

    What is kept on disk is otherwise told apart by the function's own file only, not by the files of its helpers.
    """
    code = source.__code__
    numbers = [(name, value) for name, value in _globals(source) if isinstance(value, int)]
    parts = [code.co_code, code.co_consts[1:], code.co_names, numbers, [_digest(f) for _, f in _helpers(source)]]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
