"""Lifetimes of small graphs, worked out by hand from the rules: regions, carries, nesting, barriers, streams, aliases, gaps."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from mosaic.planner.check import check_plan
from mosaic.planner.compiling import compile_body
from mosaic.planner.lifetimes import Lifetimes, derive
from mosaic.planner.planner import plan_point
from mosaic.planner.space import Config
from mosaic.registrar.graph import Buffer, Graph
from mosaic.registrar.operator import Operator
from mosaic.registrar.polynomial import Polynomial
from mosaic.registrar.validate import validate
from tests.small_programs import drawn

COPY = Operator(name="copy", operands="x:a[*T] -> y:a[*T]")
OVER = Operator(name="over", operands="x:a[*T] -> y:a[*T]", inplace=(("y", "x"),))
ADD = Operator(name="add", operands="x:a[*T] y!:a[*S]")
LOOK = Operator(name="look", operands="x@:a[*T] -> y:f32[1]")


class Small:
    """A graph over one dim, whose buffers are rows of four floats; `alive` gives lifetimes by name."""

    def __init__(self) -> None:
        self.g = Graph("small")
        self.tokens = self.g.dim("tokens")
        self.x = self.input("x")

    def input(self, name: str) -> Buffer:
        return self.g.input(name, (self.tokens, 4), "float32")

    def buffer(self, name: str, rows: Polynomial | None = None, *, rotate: int = 1) -> Buffer:
        return self.g.buffer(name, (rows if rows is not None else self.tokens, 4), "float32", rotate=rotate)

    def output(self, name: str) -> Buffer:
        return self.g.output(name, (self.tokens, 4), "float32")

    def copy(self, x: Buffer, name: str | None = None, *, out: Buffer | None = None, rule: Operator = COPY) -> Buffer:
        made: Buffer = self.g.add_op(rule, x, name=name, out=out)
        return made

    def derive(self, *active: str) -> Lifetimes:
        validate(self.g)
        return derive(compile_body(self.g), set(active))

    def alive(self, *active: str) -> dict[str, tuple[int, int]]:
        life = self.derive(*active)
        return {b.name: (life.starts[b.id], life.ends[b.id]) for b in self.g.buffers}


def test_first_access_to_last_and_kinds() -> None:
    s = Small()
    w = s.g.weight("w", (4,), "float32")
    state = s.g.state("state", (4,), "float32")
    y = s.copy(s.x, "y")  # op 0
    s.copy(y, "z")  # op 1; nobody reads z
    s.copy(w, "u")  # op 2
    s.copy(state, "v")  # op 3
    s.copy(y, "early", out=s.output("out"))  # op 4
    s.copy(s.g["u"], "end")  # op 5
    assert s.alive() == {
        "x": (0, 1), "w": (0, 6), "state": (0, 6), "y": (0, 5), "z": (1, 2), "u": (2, 6), "v": (3, 4), "out": (4, 6), "end": (5, 6),
    }  # fmt: skip


def test_an_input_that_nobody_touches_lives_one_op() -> None:
    s = Small()
    s.input("unused")
    s.copy(s.copy(s.x, "y"), "z")
    assert s.alive()["unused"] == (0, 1)


def looped() -> Small:
    """0: y = x. [1, 4) over tokens: a = y, b = a, out = b. 4: last = x."""
    s = Small()
    y, out = s.copy(s.x, "y"), s.output("out")
    with s.g.chunk("k", over=s.tokens):
        s.copy(s.copy(s.copy(y, "a"), "b"), "c", out=out)
    s.copy(s.x, "last")
    return s


def test_a_region_keeps_inputs_to_its_end_and_outputs_from_its_start() -> None:
    s = looped()
    assert s.alive() == {"x": (0, 5), "y": (0, 2), "a": (1, 3), "b": (2, 4), "out": (3, 5), "last": (4, 5)}
    assert s.alive("k") == {"x": (0, 5), "y": (0, 4), "a": (1, 3), "b": (2, 4), "out": (1, 5), "last": (4, 5)}
    (barrier,) = s.derive("k").barriers
    names = [[s.g.buffers[b].name for b in ids] for ids in (barrier.inputs, barrier.outputs)]
    assert (barrier.name, barrier.start, barrier.end, names) == ("k", 1, 4, [["y"], ["out"]])
    assert s.derive().barriers == ()


def test_what_a_region_updates_lives_through_it() -> None:
    s = Small()
    total = s.copy(s.x, "total")  # op 0
    s.copy(s.x, "between")  # op 1
    with s.g.chunk("k", over=s.tokens):
        s.copy(s.x, "a")  # op 2
        s.g.add_op(ADD, s.g["a"], total)  # op 3
        s.copy(s.x, "b")  # op 4
    assert s.alive()["total"] == (0, 4)
    assert s.alive("k")["total"] == (0, 5)


def nested() -> Small:
    """0: y. Outer [1, 6): 1: h; inner [2, 4): 2: t = look(h), 3: acc += t; 4: n = acc; 5: out. 6: z = y."""
    s = Small()
    other = s.g.dim("other")
    y, out = s.copy(s.x, "y"), s.output("out")
    with s.g.chunk("outer", over=s.tokens):
        h = s.copy(s.x, "h")
        acc = s.g.buffer("acc", (1,), "float32")
        with s.g.chunk("inner", over=other):
            t = s.g.add_op(LOOK, h, name="t")
            s.g.add_op(Operator(name="take", operands="x:a[*T] w:b[*S] -> y:a[*T]"), t,
                       s.g.weight("w", (other, 4), "float32"), out=acc)  # fmt: skip
        s.g.add_op(COPY, acc, name="n")
        s.copy(h, "o", out=out)
    s.copy(y, "z")
    return s


NESTED: dict[tuple[str, ...], dict[str, tuple[int, int]]] = {
    (): {"y": (0, 7), "x": (0, 2), "h": (1, 6), "t": (2, 4), "acc": (3, 5), "n": (4, 5), "out": (5, 7)},
    ("inner",): {"y": (0, 7), "x": (0, 2), "h": (1, 6), "t": (2, 4), "acc": (2, 5), "n": (4, 5), "out": (5, 7)},
    ("outer",): {"y": (0, 7), "x": (0, 6), "h": (1, 6), "t": (2, 4), "acc": (3, 5), "n": (4, 5), "out": (1, 7)},
    ("outer", "inner"): {"y": (0, 7), "x": (0, 6), "h": (1, 6), "t": (2, 4), "acc": (2, 5), "n": (4, 5), "out": (1, 7)},
}


@pytest.mark.parametrize("active", NESTED)
def test_nested_regions_stretch_from_the_inside_out(active: tuple[str, ...]) -> None:
    alive = nested().alive(*active)
    assert {name: alive[name] for name in NESTED[active]} == NESTED[active]


def test_an_input_of_the_inner_region_lives_to_its_end() -> None:
    s = Small()
    other = s.g.dim("other")
    with s.g.chunk("outer", over=s.tokens):
        h = s.copy(s.x, "h")  # op 0
        with s.g.chunk("inner", over=other):
            s.g.add_op(LOOK, h, name="a")  # op 1
            s.g.add_op(LOOK, s.g["a"], name="b")  # op 2
        s.copy(s.x, "c")  # op 3
    assert [s.alive(*active)["h"] for active in ((), ("outer",), ("inner",), ("outer", "inner"))] == [
        (0, 2), (0, 2), (0, 3), (0, 3),
    ]  # fmt: skip
    assert s.derive("inner").homes[h.id] is None, "a dissolved region is no home"
    assert s.derive("outer").homes[h.id] == 0


def test_barriers_stretch_and_are_recorded_only_if_they_do() -> None:
    s = Small()
    y = s.copy(s.x, "y")  # op 0
    z = s.copy(y, "z")  # op 1
    since = s.g.mark()
    s.copy(z, "u")  # op 2
    s.copy(z, "v")  # op 3
    s.g.add_barrier(y, z)
    s.g.add_barrier(s.g["v"], since=since, name="early")
    s.copy(z, "w")  # op 4
    s.g.add_barrier(z, name="needless")
    alive = s.alive()
    assert (alive["y"], alive["z"], alive["v"]) == ((0, 4), (1, 5), (2, 4))
    assert [(b.name, b.region, b.start, b.end) for b in s.derive().barriers] == [
        ("barrier", None, 3, 4),
        ("early", None, 2, 4),
    ]


def streamed(*, fork: bool = True) -> Small:
    """0: y. 1: z. Side 2: side = x. Main 3: a, 4: b; wait; 5: join reads side."""
    s = Small()
    if fork:
        s.copy(s.copy(s.x, "y"), "z")
    with s.g.stream("side"):
        side = s.copy(s.x, "side")
    s.copy(s.x, "a")
    s.copy(s.x, "b")
    s.g.wait("side")
    s.copy(s.x, "join")
    s.copy(side, "last")
    return s


def test_a_side_stream_holds_what_it_touches_from_its_fork_to_its_join() -> None:
    alive = streamed().alive()
    assert alive["side"] == (2, 7)
    assert alive["x"] == (0, 6)
    s = Small()
    s.copy(s.x, "y")  # op 0, the fork
    with s.g.stream("side"):
        s.copy(s.g["y"], "p")  # op 1
        s.copy(s.g["p"], "q")  # op 2: q may begin as soon as the fork, whatever p does
    s.copy(s.x, "a")  # op 3
    s.g.wait("side")
    s.copy(s.x, "join")  # op 4
    alive = s.alive()
    assert (alive["y"], alive["p"], alive["q"]) == ((0, 4), (1, 4), (1, 4))


def test_without_a_fork_a_side_stream_starts_with_the_step() -> None:
    alive = streamed(fork=False).alive()
    assert alive["side"] == (0, 5)
    s = Small()
    with s.g.stream("side"):
        s.copy(s.x, "p")  # op 0
        s.copy(s.x, "q")  # op 1: nothing says that the main stream is no further than op 0
    s.copy(s.x, "a")  # op 2
    s.g.wait("side")
    s.copy(s.x, "join")  # op 3
    assert (s.alive()["p"], s.alive()["q"]) == ((0, 3), (0, 3))


def test_the_wait_that_counts_is_the_first_that_follows() -> None:
    s = Small()
    s.copy(s.x, "y")  # op 0
    for serial in (1, 2):
        with s.g.stream("side"):
            s.copy(s.x, f"side{serial}")  # ops 1 and 4
        s.copy(s.x, f"main{serial}")  # ops 2 and 5
        s.g.wait("side")
        s.copy(s.x, f"join{serial}")  # ops 3 and 6
    alive = s.alive()
    assert (alive["side1"], alive["side2"]) == ((1, 3), (4, 6))


def test_an_alias_group_lives_as_one_with_gaps_where_it_holds_nothing() -> None:
    s = Small()
    y = s.copy(s.x, "y")  # op 0
    s.copy(y, "a")  # op 1: the last reader of y
    s.copy(s.x, "b")  # op 2
    s.copy(s.x, "c")  # op 3
    z = s.copy(s.x, "z")  # op 4
    s.g.add_alias(z, y)
    s.copy(z, "d")  # op 5
    life = s.derive()
    assert (life.starts[y.id], life.ends[y.id]) == (0, 6)
    assert life.gaps[y.id] == [(2, 4)]
    assert (life.starts[z.id], life.ends[z.id]) == (4, 6)


def test_in_place_leaves_no_gap() -> None:
    s = Small()
    y = s.copy(s.x, "y")
    z = s.copy(y, "z", rule=OVER)
    s.g.add_alias(z, y)
    s.copy(z, "end")
    life = s.derive()
    assert (life.starts[y.id], life.ends[y.id], life.gaps[y.id]) == (0, 3, ())


def rewritten() -> Small:
    """y is written at 0, read at 1, written anew at 4, read at 5; in a region, [3, 5) may be a loop."""
    s = Small()
    y = s.copy(s.x, "y")
    s.copy(y, "a")
    s.copy(s.x, "b")
    with s.g.chunk("k", over=s.tokens):
        s.copy(s.x, "c")
        s.copy(s.x, "again", out=y)
    s.copy(y, "d")
    return s


def test_a_complete_overwrite_opens_a_gap_before_it() -> None:
    s = rewritten()
    y = s.g["y"].id
    life = s.derive()
    assert (life.starts[y], life.ends[y], life.gaps[y]) == (0, 6, [(2, 4)])


def test_a_loop_that_fills_slices_is_no_complete_overwrite() -> None:
    s = rewritten()
    y = s.g["y"].id
    life = s.derive("k")
    assert (life.starts[y], life.ends[y], life.gaps[y]) == (0, 6, ())


@pytest.mark.parametrize("make", [looped, nested, streamed, rewritten])
def test_lifetimes_are_a_pure_function(make: Callable[[], Small]) -> None:
    assert make().derive("k", "outer") == make().derive("outer", "k")


def alive_by_values(touches: list[tuple[int, bool]]) -> list[int]:
    """Ops at which a buffer holds a value that is yet to be read, or is being written; `touches` are (op, it reads)."""
    found: set[int] = set()
    for place, (op, reads) in enumerate(touches):
        until = op
        for later, is_read in touches[place + 1 :] if not reads else ():
            if not is_read:
                break
            until = later
        found |= set(range(op, until + 1)) if not reads else set()
    return sorted(found)


@pytest.mark.parametrize("seed", range(12))
def test_gaps_are_where_no_value_is_waited_for(seed: int) -> None:
    """Random copies among a few buffers, a loop over others somewhere in between: values followed one by one."""
    rng, s = random.Random(seed), Small()
    looped_at, touches = rng.randrange(3, 9), dict[str, list[tuple[int, bool]]]()
    for number in range(12):
        if number == looped_at:
            with s.g.chunk("k", over=s.tokens):
                s.copy(s.copy(s.x, "inside"), "result", out=s.output("result"))
        op, written = len(s.g.ops), sorted(touches)
        source = s.g[rng.choice(written)] if written and rng.random() < 0.7 else s.x
        target = rng.choice([name for name in "abc" if name != source.name])
        s.copy(source, out=s.g[target] if target in touches else s.buffer(target))
        touches.setdefault(target, []).append((op, False))
        touches.get(source.name, []).append((op, True))
    life = s.derive("k")
    for name, seen in touches.items():
        alive, b = alive_by_values(seen), s.g[name].id
        assert (life.starts[b], life.ends[b]) == (alive[0], alive[-1] + 1)
        empty = {t for low, high in life.gaps[b] for t in range(low, high)}
        assert sorted(empty) == [t for t in range(alive[0], alive[-1]) if t not in alive]


@pytest.mark.some
@pytest.mark.parametrize("seed", range(24))
def test_lifetimes_of_random_programs_are_those_that_the_checker_derives(seed: int) -> None:
    """Programs of the fuzzer under random chunks; barriers are told in the order of their loops, then by their ends."""
    point, rng = drawn(seed), random.Random(seed)
    for _ in range(4):
        choices = rng.choice(point.choice_combinations)
        knobs = range(len(point.space.template.knobs))
        config = Config(choices, tuple(rng.choice(point.options(choices, knob)) for knob in knobs))
        made = plan_point(point, 1 << 40, 1 << 40, identity={"model": "fuzz"}, solver="first_fit", config=config)
        assert [str(violation) for violation in check_plan(made.document)] == []
        life = point.space.variant(config).life
        told = [barrier.region for barrier in life.barriers]
        explicit = [barrier.end for barrier in life.barriers if barrier.region is None]
        assert told == [*life.regions, *([None] * len(explicit))] and explicit == sorted(explicit)
