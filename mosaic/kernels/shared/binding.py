"""Binding a CPU kernel: operands are checked, scratch is carved and views are made once, for many runs.

A kernel's `bind` takes the arguments of its `launch` and returns a `Run`, which works on the operands' current values.
The contents of scratch are undefined before a run, so constants are written again each time.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeAlias

Run: TypeAlias = Callable[[], object]
_P = ParamSpec("_P")


def in_turn(parts: Sequence[Run]) -> Run:
    """Make one run of several."""

    def run() -> None:
        for part in parts:
            part()

    return run


def launcher(bind: Callable[_P, Run]) -> Callable[_P, None]:
    """Make a kernel's `launch` of its `bind`: bind, and run once."""

    @wraps(bind)
    def launch(*args: _P.args, **kwargs: _P.kwargs) -> None:
        bind(*args, **kwargs)()

    launch.__name__ = "launch"
    return launch
