"""How a kernel of the CPU is bound: its operands checked, its scratch carved and its views made once, to be run often.

A kernel's `bind` takes what its `launch` takes and returns a `Run`, which does the work on whatever the operands hold by
then. What a run finds in its scratch is undefined: constants are written again each time.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeAlias

Run: TypeAlias = Callable[[], object]
_P = ParamSpec("_P")


def launcher(bind: Callable[_P, Run]) -> Callable[_P, None]:
    """Make a kernel's `launch` of its `bind`: bind, and run once."""

    @wraps(bind)
    def launch(*args: _P.args, **kwargs: _P.kwargs) -> None:
        bind(*args, **kwargs)()

    launch.__name__ = "launch"
    return launch
