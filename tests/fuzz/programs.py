"""Random programs: operators, loops, choices, side streams, barriers and aliases, by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from mosaic.errors import GraphError
from mosaic.registrar.validate import validate

from .building import register
from .language import (
    Alias,
    Body,
    Call,
    Choose,
    Declare,
    Dim,
    Keep,
    Loop,
    Mark,
    Program,
    Size,
    Statement,
    declarations,
    walk,
)
from .operators import OPERATORS, any_width, fresh_matrix, linear
from .scope import Scope, Value
from .streams import LOOPED, STREAMS

__all__ = ["random_program"]

KNOBS: Final = 3


def random_program(seed: int) -> Program:
    """A program that Mosaic must accept; its aliases are those of several tried that `validate` takes."""
    rng = random.Random(seed)
    program = _Generator(rng).program()
    for alias in _aliases(program, rng):
        tried = replace(program, body=(*program.body, alias))
        if _is_accepted(tried):
            program = tried
    return program


class _Generator:
    def __init__(self, rng: random.Random) -> None:
        tokens = rng.choice([1, 2, 3, 5, 8, 13, 24, 40])
        dims = {"tokens": Dim(tokens)}
        if rng.random() < 0.5:
            dims["masked"] = Dim(rng.randint(1, tokens), at_most="tokens")
        if rng.random() < 0.6:
            dims["groups"] = Dim(rng.randint(1, 4), fixed=True)
        dims["extents"], dims["kv_rows"] = Dim(rng.randint(3, 6)), Dim(tokens + rng.randint(3, 9))
        dtype = "float64" if rng.random() < 0.75 else "float32"
        self.rng, self.scope = rng, Scope(rng, dims, dtype, ordered=rng.random() < 0.12)
        self.knobs: dict[str, tuple[str, int]] = {}
        self.choices = 0
        self.streams = not self.scope.adopts and rng.random() < 0.35
        self.nested = False

    def program(self) -> Program:
        scope = self.scope
        for _ in range(self.rng.randint(1, 2)):
            fresh_matrix(scope)
        self.statements(self.rng.randint(3, 14))
        self.outputs()
        used = {str(d) for s in walk(scope.here) for d in _dims_of(s)}
        dims = {name: dim for name, dim in scope.dims.items() if name in used or name == "tokens"}
        stateful = any(d.kind == "state" for d in declarations(scope.here).values())
        return Program(dims, tuple(scope.here), scope.ordered, steps=2 if stateful else 1)

    def statements(self, count: int) -> None:
        for _ in range(count):
            self.statement()

    def statement(self) -> None:
        rng, scope = self.rng, self.scope
        what = rng.random()
        free = [d for d in ("tokens", "masked", "groups") if d in scope.dims and d not in scope.open]
        if what < 0.17 and free and len(scope.open) < 2:
            self.loop(rng.choice(free), lambda: self.statements(rng.randint(1, 5)))
        elif what < 0.22 and not scope.open and self.choices < 2 and not self.nested:
            self.choice()
        elif what < 0.28:
            self.barrier()
        elif what < 0.42 and self.streams and not self.nested:
            self.stream()
        else:
            names = list(OPERATORS)
            name = rng.choices(names, [OPERATORS[n][0] for n in names])[0]
            if not OPERATORS[name][1](scope):
                linear(scope)

    def stream(self) -> None:
        function = self.rng.choice(list(STREAMS.values()))
        self.nested = True
        more: tuple[Callable[..., object], ...] = (self.statements, *((self.loop,) if function in LOOPED else ()))
        function(self.scope, *more)
        self.nested = False

    # --- loops and choices ----------------------------------------------------------------------------------------

    def loop(self, dim: str, write: Callable[[], None]) -> None:
        scope = self.scope
        knob, tile = self.knob(dim)
        name = scope.name("L")
        with scope.loop(dim) as body:
            write()
            self.rescue(dim)
        if _has_calls(body):
            scope.here.append(Loop(name, knob, dim, tile, tuple(body)))
            return
        for declared in declarations(body):  # a loop that does nothing is left out, and what it declared with it
            scope.values.pop(declared, None)

    def rescue(self, dim: str) -> None:
        """Hand on some of what a loop makes, so that it matters: filled slice by slice, or added up."""
        scope, rng = self.scope, self.rng
        for value in list(scope.values.values()):
            if (
                dim not in value.home
                or value.used
                or not scope.readable(value)
                or rng.random() < 0.3
                or value.dtype != scope.dtype
            ):
                continue
            if len(value.shape) != 2 or value.held:
                continue
            if all(any(not isinstance(s, int) and s[0] == d for s in value.shape) for d in scope.open):
                goal = scope.declare("t", rng.choice(["transient", "output"]), value.shape, outside=True)
                scope.call("copy", value, into=(goal,))
            elif not isinstance(value.width, int) and value.width[0] == dim:
                self.add_up(value, dim)

    def add_up(self, value: Value, dim: str) -> None:
        """Add what a loop cuts into something from outside of it."""
        scope = self.scope
        sink = scope.pick(
            lambda v: v.ready and v.rows == value.rows and len(v.shape) == 2 and isinstance(v.width, int)
            and v.dtype == scope.dtype and scope.writable(v, summed=value.width) and dim not in v.home and v is not value
        )  # fmt: skip
        if sink is not None:
            scope.call("linear_add", value, scope.weight((sink.width, value.width)), sink, updates=sink)

    def knob(self, dim: str) -> tuple[str, int]:
        known = [(name, tile) for name, (over, tile) in self.knobs.items() if over == dim]
        if known and (self.rng.random() < 0.5 or len(self.knobs) >= KNOBS):
            return self.rng.choice(known)
        name, tile = f"knob{len(self.knobs)}", 1 if dim == "groups" else self.rng.choice([1, 1, 2, 3, 4])
        self.knobs[name] = (dim, tile)
        return name, tile

    def choice(self) -> None:
        """Two or three ways to fill one buffer, all with the same weights, registered in an order of their own."""
        scope, rng = self.scope, self.rng
        x = scope.matrix()
        if x is None:
            return
        self.choices += 1
        self.nested = True
        result = scope.declare("c", "transient", (x.rows, any_width(scope)))
        bodies: dict[str, list[Statement]] = {}
        for option in ["a", "b", "c"][: rng.randint(2, 3)]:
            with scope.branch() as body:
                self.statements(rng.randint(0, 3))
                last = scope.matrix(lambda v: v.rows == x.rows and v is not scope.values[result.name]) or x
                scope.call("linear", last, scope.weight((result.width, last.width)), into=(result,))
            bodies[option] = body
        self.nested = False
        result.ready = True
        scope.here.append(Choose(f"choice{self.choices}", _same_weights(bodies, rng)))

    def barrier(self) -> None:
        """Keep some buffers alive, from here or from an earlier mark on."""
        scope, rng = self.scope, self.rng
        if not _has_calls(scope.here):
            return
        names = [
            v.name
            for v in scope.values.values()
            if v.ready and v.kind in ("transient", "output", "state") and not v.held
        ]
        if not names:
            return
        kept = tuple(rng.sample(names, min(len(names), rng.randint(1, 2))))
        marks = [s.label for i, s in enumerate(scope.here) if isinstance(s, Mark) and _has_calls(scope.here[i:])]
        scope.here.append(Keep(kept, rng.choice(marks) if marks and rng.random() < 0.5 else None))
        scope.here.append(Mark(scope.name("m")))

    def outputs(self) -> None:
        """Return most of the unread values."""
        scope = self.scope
        ends = [
            v
            for v in scope.values.values()
            if v.kind == "transient" and v.ready and not v.used and v.dtype == scope.dtype
        ]
        for value in ends:
            if self.rng.random() < 0.8:
                self.output(value)
        if not any(isinstance(s, Declare) and s.kind == "output" for s in walk(scope.here)):
            self.output(scope.matrix() or fresh_matrix(scope))

    def output(self, value: Value) -> None:
        scope = self.scope
        if len(value.shape) == 2 and self.rng.random() < 0.4:
            goal = scope.declare("y", "output", (value.rows, 3))
            scope.call("linear", value, scope.weight((3, value.width)), into=(goal,))
        else:
            scope.call("copy", value, into=(scope.declare("y", "output", value.shape),))


def _has_calls(body: Sequence[Statement]) -> bool:
    return any(isinstance(s, Call) for s in walk(body))


def _dims_of(s: Statement) -> list[str]:
    if isinstance(s, Loop):
        return [s.dim]
    shapes = (s.shape,) if isinstance(s, Declare) else s.shapes if isinstance(s, Call) else ()
    return [size[0] for shape in shapes for size in shape if not isinstance(size, int)]


def _same_weights(bodies: dict[str, list[Statement]], rng: random.Random) -> dict[str, Body]:
    """Let every option declare the inputs, weights, states and outputs of all of them first, in an order of its own."""
    shared = {
        s.name: s
        for body in bodies.values()
        for s in walk(body)
        if isinstance(s, Declare) and s.kind in ("weight", "state")
    }
    result = {}
    for option, body in bodies.items():
        order = [*shared.values()]
        rng.shuffle(order)
        result[option] = (*order, *_without(tuple(body), set(shared)))
    return result


def _without(body: Body, names: set[str]) -> Body:
    """The body without the declarations of these names."""
    kept = tuple(s for s in body if not (isinstance(s, Declare) and s.name in names))
    return tuple(replace(s, body=_without(s.body, names)) if isinstance(s, Loop) else s for s in kept)


# --- aliases ----------------------------------------------------------------------------------------------------------


def _aliases(program: Program, rng: random.Random) -> list[Alias]:
    """Pairs worth trying: what works in place, and any two buffers of which one may be dead when the other begins."""
    tried: list[Alias] = []
    floats = [s for s in walk(program.body) if isinstance(s, Declare) and s.kind in ("transient", "output")]
    names = [s.name for s in floats]
    for s in walk(program.body):
        if isinstance(s, Call) and not s.into:
            names += s.writes
        if (
            isinstance(s, Call)
            and s.kernel in ("rms_norm", "attention", "kv_attention", "shift_rows")
            and rng.random() < 0.5
        ):
            tried.append(Alias(s.writes[0], str(s.reads[0])))
    states = [s.name for s in walk(program.body) if isinstance(s, Declare) and s.kind == "state"]
    for _ in range(4 if len(names) > 1 else 0):
        a, b = rng.sample(names, 2)
        if states and rng.random() < 0.1:
            b = rng.choice(states)
        offset: Size = rng.choice([0, 0, 0, 512, 1024, ("tokens", 512)])
        tried.append(Alias(a, b, offset))
    return tried


def _is_accepted(program: Program) -> bool:
    try:
        options = [s for s in walk(program.body) if isinstance(s, Choose)]
        make = register(program)
        for k in range(max((len(s.options) for s in options), default=1)):
            validate(make({s.name: list(s.options)[k % len(s.options)] for s in options}))
    except (GraphError, KeyError):
        return False
    return True
