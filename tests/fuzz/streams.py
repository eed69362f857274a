"""Ways to use side streams: weights fetched ahead, activations spilled, windows that rotate, and a fork in each iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from .language import Beside, Size, Statement, Wait
from .operators import linear
from .scope import Scope, Value

__all__ = ["STREAMS"]

More = Callable[[int], None]
"""Writes a number of further statements."""


def beside(scope: Scope, stream: str, source: Value, goal: Value) -> None:
    """Copy on a side stream; the source is held until `join`."""
    outside, body = scope.here, list[Statement]()
    scope.here = body
    scope.call("copy", source, into=(goal,))
    scope.here = outside
    scope.here.append(Beside(stream, tuple(body)))
    source.held, goal.held, goal.ready = True, True, False


def join(scope: Scope, stream: str, source: Value, goal: Value) -> None:
    scope.here.append(Wait(stream))
    source.held = goal.held = False
    goal.ready = True


def fetched(scope: Scope, more: More) -> bool:
    """A weight in host memory, on its way while other ops run."""
    if scope.open:
        return False
    x = scope.matrix()
    if x is None:
        return False
    shape = (scope.rng.choice([2, 4, 8]), x.width)
    source, slot = scope.declare("h", "host", shape, fill="matrix"), scope.declare("f", "transient", shape)
    beside(scope, "fetch", source, slot)
    more(scope.rng.randint(1, 2))
    join(scope, "fetch", source, slot)
    scope.call("linear", x, slot, shapes=((x.rows, shape[0]),))
    return True


def spilled(scope: Scope, more: More) -> bool:
    """A value goes to host memory and comes back later."""
    x = scope.matrix(lambda v: v.kind == "transient" and not v.held)
    if scope.open or x is None:
        return False
    host, back = scope.declare("h", "host", x.shape), scope.declare("b", "transient", x.shape)
    beside(scope, "store", x, host)
    more(1)
    join(scope, "store", x, host)
    scope.call("copy", x, shapes=(x.shape,))  # it is a main op that waits
    beside(scope, "fetch", host, back)
    more(1)
    join(scope, "fetch", host, back)
    scope.call("linear", back, scope.weight((4, x.width)), shapes=((x.rows, 4),))
    return True


def forked(scope: Scope, more: More) -> bool:
    """Beside the main stream within one iteration, or outside of all loops."""
    x = scope.matrix(lambda v: v.kind == "transient" and not v.held and set(scope.open) <= v.home)
    if x is None:
        return False
    twin = scope.declare("k", "transient", x.shape)
    beside(scope, "side", x, twin)
    scope.call("linear", x, scope.weight((6, x.width)), shapes=((x.rows, 6),))
    join(scope, "side", x, twin)
    scope.call("linear", twin, scope.weight((4, x.width)), shapes=((x.rows, 4),))
    return True


def windows(scope: Scope, more: More, loop: Callable[..., object]) -> bool:
    """A residual in host memory: windows of it are fetched, updated and stored beside the main stream."""
    rng = scope.rng
    x = scope.matrix(lambda v: v.rows == ("tokens", 1) and isinstance(v.width, int))
    if scope.open or x is None:
        return False
    host = scope.declare("r", "host", x.shape)
    scope.call("copy", x, into=(host,))

    def body() -> None:
        window = scope.declare("z", "transient", x.shape, rotate=rng.choice([2, 2, 3]))
        beside(scope, "fetch", host, window)
        if rng.random() < 0.5:
            linear(scope)
        join(scope, "fetch", host, window)
        h = scope.call("linear", window, scope.weight((6, x.width)), shapes=((x.rows, 6),))
        if rng.random() < 0.5:
            scope.call("rms_norm", h, scope.weight((6,), "around one"), shapes=(h.shape,), eps=1e-5)
        scope.call("linear_add", h, scope.weight((x.width, 6)), window, updates=window)
        beside(scope, rng.choice(["store", "fetch"]), window, host)
        window.ready = False

    loop("tokens", body)
    host.held = False
    host.ready = True
    scope.call("copy", host, shapes=(x.shape,))
    return True


def groups(scope: Scope, more: More, loop: Callable[..., object]) -> bool:
    """Each group's weights arrive in one of two slots while the group before computes; their outputs add up."""
    x = scope.matrix(lambda v: isinstance(v.width, int))
    if scope.open or x is None or "groups" not in scope.dims:
        return False
    size: Size = ("groups", scope.rng.choice([1, 2, 4]))
    source = scope.declare("h", "host", (size, x.width), fill="matrix")
    total = scope.call("copy", x, shapes=(x.shape,))
    down = scope.weight((x.width, size))

    def body() -> None:
        slot = scope.declare("u", "transient", (size, x.width), rotate=2)
        beside(scope, "fetch", source, slot)
        join(scope, "fetch", source, slot)
        h = scope.call("linear", x, slot, shapes=((x.rows, size),))
        scope.call("linear_add", h, down, total, updates=total)
        slot.ready = False

    loop("groups", body)
    return True


SIMPLE: Final = (fetched, spilled, forked)
LOOPED: Final = (windows, groups)
STREAMS: Final[Mapping[str, Callable[..., bool]]] = {f.__name__: f for f in (*SIMPLE, *LOOPED)}
"""Functions that write statements into a scope, or return False; those of `LOOPED` open a loop."""
