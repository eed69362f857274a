"""The buffers of a program being generated, and their allowed uses inside its current loops.

A program is *free* if its result does not depend on how loops are cut. Rules that a free program obeys inside a loop
over d, for a value v from outside of it:

- v is read whole, or uncut by d, only before anything in the loop writes it; what was read so is not written any more;
- v is written where d cuts it, or added to, with d cutting what is summed up;
- nothing else is summed over what d cuts.

An *ordered* program may do all of that; its meaning is that of the loops as they run. But in no program anything is read
that nothing has written: what loops fill slice by slice holds a whole value when they have ended.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from .language import Call, Declare, Dim, Shape, Size, Statement

__all__ = ["Scope", "Value", "cuts"]


@dataclass
class Value:
    """A buffer of the program: in which loops it is at home, written so far, was read uncut, or is being filled."""

    name: str
    shape: Shape
    dtype: str
    kind: str
    home: frozenset[str]
    ready: bool = True
    written: set[str] = field(default_factory=set)
    uncut: set[str] = field(default_factory=set)
    filling: set[str] = field(default_factory=set)
    """Open loops of which each iteration writes a slice of what held no value before."""
    held: bool = False
    """Whether a side stream is reading it."""
    used: bool = False

    @property
    def rows(self) -> Size:
        return self.shape[0]

    @property
    def width(self) -> Size:
        return self.shape[-1]


def cuts(dim: str, shape: Shape) -> bool:
    """Whether a loop over a dim cuts a shape."""
    return any(not isinstance(size, int) and size[0] == dim for size in shape)


class Scope:
    """Values by name, the open loops, and the statements written so far."""

    def __init__(self, rng: random.Random, dims: dict[str, Dim], dtype: str, ordered: bool) -> None:
        self.rng, self.dims, self.dtype, self.ordered = rng, dims, dtype, ordered
        self.adopts = rng.random() < 0.2
        """Whether some weights are tensors of the caller's."""
        self.values: dict[str, Value] = {}
        self.open: list[str] = []
        self.here: list[Statement] = []
        self._serial = 0

    # --- writing --------------------------------------------------------------------------------------------------

    def name(self, stem: str) -> str:
        self._serial += 1
        return f"{stem}{self._serial}"

    def declare(
        self,
        stem: str,
        kind: str,
        shape: Shape,
        dtype: str | None = None,
        fill: str = "",
        rotate: int = 1,
        outside: bool = False,
    ) -> Value:
        """Declare a buffer here; one without values is not ready before something is written."""
        name = self.name(stem)
        self.here.append(Declare(name, kind, shape, dtype or self.dtype, fill, rotate, outside))
        home = frozenset(self.open) if kind == "transient" and not outside else frozenset[str]()
        value = self.values[name] = Value(name, shape, dtype or self.dtype, kind, home, ready=bool(fill))
        return value

    def weight(self, shape: Shape, fill: str = "matrix", dtype: str | None = None) -> Value:
        """A parameter: one of that shape that there is, now and then, or a new one."""
        dtype = dtype or self.dtype
        known = [
            v for v in self.values.values() if v.kind in ("weight", "external") and (v.shape, v.dtype) == (shape, dtype)
        ]
        if known and self.rng.random() < 0.3:
            return self.rng.choice(known)
        return self.declare(
            "w", "external" if self.adopts and self.rng.random() < 0.3 else "weight", shape, dtype, fill
        )

    def call(
        self,
        kernel: str,
        *reads: Value | None,
        shapes: tuple[Shape, ...] = (),
        dtypes: tuple[str, ...] = (),
        into: tuple[Value, ...] = (),
        updates: Value | None = None,
        whole: tuple[Value, ...] = (),
        **attrs: Any,
    ) -> Value:
        """Append an op; the first value that it makes, fills or updates."""
        for value in reads:
            if value is not None and value is not updates:
                self._note_read(value, value in whole)
        made = tuple(
            Value(self.name("v"), shape, dtype, "transient", frozenset(self.open))
            for shape, dtype in zip(shapes, dtypes or (self.dtype,) * len(shapes), strict=True)
        )
        writes = tuple(value.name for value in (into or made))
        self.here.append(Call(kernel, tuple(v.name if v else None for v in reads), writes, bool(into), attrs, shapes))
        for value in (*made, *into, *((updates,) if updates else ())):
            self.values[value.name] = value
            if not value.ready:
                value.filling = {d for d in self.outer(value) if cuts(d, value.shape)}
            value.ready = True
            value.used = value.used and value in made
            value.written |= self.outer(value)
        return (into or made or (updates,))[0]  # type: ignore[return-value]

    @contextmanager
    def loop(self, dim: str) -> Iterator[list[Statement]]:
        """Open a loop over a dim; gives the list that its body is written to."""
        outside, self.here = self.here, []
        self.open.append(dim)
        yield self.here
        self.open.remove(dim)
        self.here = outside
        self.values = {name: value for name, value in self.values.items() if dim not in value.home}
        for value in self.values.values():
            value.written.discard(dim)
            value.uncut.discard(dim)
            value.filling.discard(dim)

    @contextmanager
    def branch(self) -> Iterator[list[Statement]]:
        """Open one option of a choice: what it declares is gone after it, but what it did to others is remembered."""
        outside, before = self.here, deepcopy(self.values)
        self.here = []
        yield self.here
        after, self.here, self.values = self.values, outside, before
        for name, value in self.values.items():
            value.uncut |= after[name].uncut
            value.written |= after[name].written
            value.used |= after[name].used

    # --- what is allowed ------------------------------------------------------------------------------------------

    def outer(self, value: Value) -> set[str]:
        """Open loops that the value is not at home in."""
        return set(self.open) - value.home

    def _note_read(self, value: Value, whole: bool) -> None:
        value.used = True
        value.uncut |= {d for d in self.outer(value) if whole or not cuts(d, value.shape)}

    def readable(self, value: Value, *, whole: bool = False) -> bool:
        """Whether an op may read the value here; `whole` as an operand that loops never slice."""
        if not value.ready or value.kind == "host":
            return False
        outer = self.outer(value)
        if whole and any(cuts(d, value.shape[1:] if d in outer else value.shape) for d in self.open):
            return False
        if whole and value.filling:
            return False
        return self.ordered or not any(d in value.written and (whole or not cuts(d, value.shape)) for d in outer)

    def writable(self, value: Value, *, summed: Size | None = None) -> bool:
        """Whether an op may overwrite or update the value here; `summed` is the size that it adds up over."""
        if value.kind not in ("transient", "output", "state") or value.held:
            return False
        if self.ordered:
            return True
        return all(
            d not in value.uncut and (cuts(d, value.shape) or (summed is not None and cuts(d, (summed,))))
            for d in self.outer(value)
        )

    def sums(self, size: Size) -> bool:
        """Whether an op may sum over this size into a value that is at home here."""
        return self.ordered or isinstance(size, int) or size[0] not in self.open

    # --- finding --------------------------------------------------------------------------------------------------

    def pick(self, accept: Callable[[Value], bool]) -> Value | None:
        """One of the values that are accepted; recent ones are likelier."""
        found = [value for value in self.values.values() if accept(value)]
        if not found:
            return None
        return found[-1 - min(int(self.rng.expovariate(0.45)), len(found) - 1)]

    def matrix(self, accept: Callable[[Value], bool] = lambda _: True, *, whole: bool = False) -> Value | None:
        """A matrix of activations that may be read here."""
        return self.pick(
            lambda v: (
                len(v.shape) == 2
                and v.dtype == self.dtype
                and v.kind in ("transient", "input", "output", "state")
                and self.readable(v, whole=whole)
                and accept(v)
            )
        )
