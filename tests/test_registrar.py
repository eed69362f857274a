"""The DSL: what it infers, what it refuses and where it says so, slices, streams, serialisation, drawings, operator lists."""

# mypy: disable-error-code="func-returns-value, arg-type"
from __future__ import annotations

import inspect
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import diffusion_gemma_toy as toy
import pytest

import mosaic.registrar.operators as operators
from mosaic.devices import load_device
from mosaic.errors import GraphError, MissingExtra, UnknownName
from mosaic.kernels import load as load_kernel
from mosaic.kernels.binding import kernel_of, launcher_of, reference_of
from mosaic.models import PRESETS, load
from mosaic.models.parts import LOGITS
from mosaic.models.phase import Phase
from mosaic.planner.planner import plan_point
from mosaic.planner.space import Config, Space
from mosaic.planner.template import compile_template
from mosaic.registrar.draw import to_dot, to_mermaid, to_networkx
from mosaic.registrar.graph import Buffer, Edge, Graph, Slice
from mosaic.registrar.operator import BACKENDS, Operator
from mosaic.registrar.operators import OPERATORS
from mosaic.registrar.operators import operator as contract
from mosaic.registrar.polynomial import Polynomial, symbol
from mosaic.registrar.program import Program
from mosaic.registrar.serialize import from_json, to_json
from mosaic.registrar.validate import validate

COPY = Operator(name="copy", operands="x:a[*T] -> y:a[*T]")
OVER = Operator(name="over", operands="x:a[*T] -> y:a[*T]", inplace=(("y", "x"),))
TOUCH = Operator(name="touch", operands="x!:a[*T]")
LOOK = Operator(name="look", operands="x@:a[*T] -> y:f32[1]")
PAIR = Operator(name="pair", operands="x:a[*T] y?:b[*S] -> z:a[*T]")
WIDE = 64


def start(width: int = WIDE) -> tuple[Graph, Polynomial, Buffer]:
    """A graph with one dim and one input of [tokens, width]."""
    g = Graph("test")
    tokens = g.dim("tokens")
    return g, tokens, g.input("x", (tokens, width), "float32")


def finish(g: Graph, x: Buffer) -> None:
    """Write an output from x, so that the graph is complete."""
    g.add_op(COPY, x, out=g.output("out", x.shape, x.dtype), name="finish")


def here() -> str:
    """`file:line` of the line after the caller's."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return f"test_registrar.py:{frame.f_back.f_lineno + 1}"


# -- errors at registration ----------------------------------------------------------------------------------------


def test_a_mismatch_names_the_op_the_operands_their_shapes_and_the_line() -> None:
    g, _, x = start()
    w = g.weight("w", (32, 48), "float32")
    with g.scope("layers.3"), pytest.raises(GraphError) as caught:
        line = here()
        g.add_op("linear", x, w, name="up")
    assert str(caught.value) == (
        f"layers.3/up ({line}): linear(x float32[tokens, 64], weight float32[32, 48]): operand 'weight' is float32[32, 48], "
        "expected float32[32, 64] (a[O, I])"
    )


def test_the_line_is_the_users_own_in_a_region_too() -> None:
    g, tokens, x = start()
    with pytest.raises(GraphError) as caught, g.chunk("ffn", over=tokens):
        line = here()
        g.add_op("rms_norm", x, g.weight("w", (63,), "float32"), eps=1e-6)
    assert f"rms_norm ({line}): rms_norm(x float32[ffn_rows, 64], weight float32[63])" in str(caught.value)


Wrong = Callable[[Graph, Polynomial, Buffer], Any]


def _in_region(g: Graph, tokens: Polynomial, body: Callable[[], Any]) -> None:
    with g.chunk("a", over=tokens):
        body()


def _chunks(g: Graph, x: Buffer, *knobs: tuple[str, Polynomial, int]) -> None:
    for serial, (knob, over, tile) in enumerate(knobs):
        with g.chunk(knob, over=over, tile=tile, name=f"r{serial}"):
            g.add_op(LOOK, x)


def _nested(g: Graph, tokens: Polynomial, x: Buffer) -> None:
    with g.chunk("a", over=tokens), g.chunk("b", over=tokens):
        g.add_op(COPY, x)


def _empty_region(g: Graph, tokens: Polynomial, _: Buffer) -> None:
    with g.chunk("a", over=tokens):
        pass


def _side_of_side(g: Graph) -> None:
    with g.stream("s"), g.stream("t"):
        pass


def _other() -> Buffer:
    return Graph("other").input("foreign", (4,), "float32")


REFUSED: dict[str, tuple[str, Wrong]] = {
    "too few operands": (r"linear reads x, weight, bias\?, got 1 operands", lambda g, t, x: g.add_op("linear", x)),
    "too many operands": (r"copy reads x, got 2 operands", lambda g, t, x: g.add_op(COPY, x, x)),
    "an operand that is none": (r"'x' must be a buffer of this graph, got 3", lambda g, t, x: g.add_op(COPY, 3)),
    "a required operand left out": (r"'x' must be a buffer of this graph, got None", lambda g, t, x: g.add_op(COPY, None)),
    "a buffer of another graph": (r"'x' must be a buffer of this graph, got foreign", lambda g, t, x: g.add_op(COPY, _other())),
    "an unknown attribute": (r"rms_norm\(x .*\): there is no attribute 'epsilon'; there are eps", lambda g, t, x: g.add_op(
        "rms_norm", x, g.weight("w", (WIDE,), "float32"), epsilon=1.0)),
    "an attribute that is no JSON": (r"attribute rows=\[1, 2\] must be a number", lambda g, t, x: g.add_op(
        Operator(name="any", operands="x:a[*T] -> y:a[*T]", attrs="rows"), x, rows=[1, 2])),
    "out= of another shape": (r"writes y float32\[tokens, 64\], but out= is y: float32\[tokens, 8\] \(test_registrar",
        lambda g, t, x: g.add_op(COPY, x, out=g.output("y", (t, 8), "float32"))),
    "out= of another dtype": (r"but out= is y: bfloat16", lambda g, t, x: g.add_op(
        COPY, x, out=g.output("y", (t, WIDE), "bfloat16"))),
    "too many out=": (r"copy writes y, out= gives 2", lambda g, t, x: g.add_op(COPY, x, out=(x, x))),
    "out= that is an operand": (r"out= gives x: .*, which it also reads", lambda g, t, x: g.add_op(COPY, x, out=x)),
    "out= of another graph": (r"out= must give buffers of this graph, got foreign",
        lambda g, t, x: g.add_op(COPY, x, out=_other())),
    "a write to a weight": (r"touch \(.*: writes the weight w: float32\[4\]", lambda g, t, x: g.add_op(
        TOUCH, g.weight("w", (4,), "float32"))),
    "a result written twice": (r"pair2 \(.*: out= gives y: float32\[tokens, 64\] twice", lambda g, t, x: g.add_op(
        Operator(name="pair2", operands="x:a[*T] -> y:a[*T] z:a[*T]"), x,
        out=(y := g.output("y", x.shape, x.dtype), y))),
    "a write to a weight of the host": (r"touch \(.*: writes the weight w: float32\[4\]", lambda g, t, x: g.add_op(
        TOUCH, g.buffer("w", (4,), "float32", kind="host", tensor="model.w"))),
    "an unknown dtype": (r"y \(.*unknown dtype 'fp8'", lambda g, t, x: g.input("y", (t,), "fp8")),
    "a size of zero": (r"y \(.*\): 0 is no size", lambda g, t, x: g.input("y", (t, 0), "float32")),
    "a dim of nobody": (r"y \(.*\): n is no size", lambda g, t, x: g.input("y", (symbol("n"),), "float32")),
    "a name twice": (r"x \(.*the name is taken by x: float32\[tokens, 64\] \(test_reg",
        lambda g, t, x: g.input("x", (t,), "float32")),
    "a weight of two shapes": (r"w \(.*asked for a weight float32\[5\], but it is a weight float32\[4\]", lambda g, t, x: (
        g.weight("w", (4,), "float32"), g.weight("w", (5,), "float32"))),
    "a weight of two tensors": (r"w \(.*asked for tensor 'b', but it is 'a'", lambda g, t, x: (
        g.weight("w", (4,), "float32", tensor="a"), g.weight("w", (4,), "float32", tensor="b"))),
    "a state asked for as a carry": (r"asked for a carry .* but it is a state", lambda g, t, x: (
        g.state("s", (4,), "float32"), g.carry("s", (4,), "float32"))),
    "a dim of two bounds": (r"dim 'n' \(.*asked for at_most=m, declared with at_most=tokens", lambda g, t, x: (
        g.dim("m"), g.dim("n", at_most="tokens"), g.dim("n", at_most="m"))),
    "a dim of two values": (r"asked for value=4, declared with value=3", lambda g, t, x: (
        g.dim("n", value=3), g.dim("n", value=4))),
    "a bound that is no dim": (r"bounded by 'all', which is not declared", lambda g, t, x: g.dim("n", at_most="all")),
    "a buffer that is not there": (r"no buffer 'y' in graph 'test'", lambda g, t, x: g["y"]),
    "a region without ops": (r"region a \(.*has no ops", _empty_region),
    "a region's name twice": (r"region a \(.*the name is taken", lambda g, t, x: (
        _in_region(g, t, lambda: g.add_op(COPY, x)), _in_region(g, t, lambda: g.add_op(COPY, x)))),
    "a region over no dim": (r"over= must be a dim of this graph, got 2\*tokens", lambda g, t, x: _chunks(g, x, ("a", 2 * t, 8))),
    "a knob over two dims": (r"over n, but the same knob is over tokens elsewhere", lambda g, t, x: _chunks(
        g, x, ("a", t, 8), ("a", g.dim("n"), 8))),
    "a knob of two tiles": (r"tile 16, but the same knob was given tile 8", lambda g, t, x: _chunks(
        g, x, ("a", t, 8), ("a", t, 16))),
    "a knob whose rows are a dim": (r"its rows would be called a_rows, which is a dim", lambda g, t, x: (
        g.dim("a_rows"), _in_region(g, t, lambda: g.add_op(COPY, x)))),
    "a dim named as a knob's rows": (r"the rows of the chunk knob 'a' have this name", lambda g, t, x: (
        _in_region(g, t, lambda: g.add_op(COPY, x)), g.dim("a_rows"))),
    "a dim sliced twice": (r"a region over tokens is open already", _nested),
    "a dim that cannot be sliced": (r"region a cannot slice axis 0 of x e: .*: tokens \+ 1 is no multiple of tokens",
        lambda g, t, x: _in_region(g, t, lambda: g.add_op(COPY, g.input("e", (t + 1,), "int32")))),
    "an alias of itself": (r"x \(.*aliases itself", lambda g, t, x: g.add_alias(x, x)),
    "an alias twice": (r"is an alias already", lambda g, t, x: (
        y := g.add_op(COPY, x), g.add_alias(y, x), g.add_alias(y, x))),
    "an alias under aliases": (r"others alias it already; alias the root first", lambda g, t, x: (
        y := g.add_op(COPY, x), z := g.add_op(COPY, y), g.add_alias(z, y), g.add_alias(y, x))),
    "an alias of a weight": (r"a transient cannot alias a weight", lambda g, t, x: g.add_alias(
        g.add_op(COPY, x), g.weight("w", (4,), "float32"))),
    "an alias of a state": (r"a transient cannot alias a state", lambda g, t, x: g.add_alias(
        g.add_op(COPY, x), g.state("s", (t, WIDE), "float32"))),
    "an alias of a double buffer": (r"the slots of a double buffer are shared with no alias", lambda g, t, x: (
        y := g.add_op(COPY, x), g.add_alias(y, g.buffer("b", (t, WIDE), "float32", rotate=2)))),
    "an alias that may be misaligned": (r"lies 256\*tokens bytes into y, .* no multiple of 512 for all dims", lambda g, t, x: (
        y := g.add_op(COPY, x, name="y"), g.add_alias(g.add_op(COPY, x), y, offset=y.bytes))),
    "a barrier before any op": (r"nothing has been registered yet", lambda g, t, x: g.add_barrier(x)),
    "a barrier for nothing": (r"name the buffers", lambda g, t, x: (g.add_op(COPY, x), g.add_barrier())),
    "a barrier since the future": (r"since=7 is no earlier mark", lambda g, t, x: (
        g.add_op(COPY, x), g.add_barrier(x, since=7))),
    "a wait without a stream": (r"wait\('s'\) \(.*nothing was registered on that stream", lambda g, t, x: g.wait("s")),
    "a stream named main": (r"streams fork from the main stream only", lambda g, t, x: g.stream("main").__enter__()),
    "a stream in a stream": (r"streams fork from the main stream only", lambda g, t, x: _side_of_side(g)),
    "an unknown option": (r"choice 'how' .* is one of a, b, got 'c'", lambda g, t, x: Graph("h", choices={"how": "c"}).choice(
        "how", ("a", "b"))),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused_at_registration(what: str) -> None:
    message, register = REFUSED[what]
    with pytest.raises(GraphError, match=message) as caught:
        register(*start())
    if what != "a buffer that is not there":
        assert re.search(r"\(test_registrar\.py:\d+\)", str(caught.value)), "the message must show the user's line"


def test_an_unknown_operator_is_guessed() -> None:
    g, _, x = start()
    with pytest.raises(UnknownName, match=r"Did you mean 'rms_norm'\?.*Pass an Operator of your own"):
        g.add_op("rmsnorm", x)


@pytest.mark.parametrize("operands", ["x", "x:a", "x:a[T] y", "x:a[T], y:a[T]", "X:a[T]"])
def test_operands_that_are_not_in_the_notation_are_refused(operands: str) -> None:
    with pytest.raises(GraphError, match=r"operands are written as 'x:a\[T, F\]', not"):
        Operator(name="bad", operands=operands)


def test_a_dtype_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UnknownName, match=r"dtype 'flot32'. Did you mean 'float32'"):
        Operator(name="bad", operands="x:flot32[T]")


def test_optional_operands_may_be_left_out_or_none() -> None:
    g, _, x = start()
    for operands in ((x,), (x, None), (x, x)):
        g.add_op(PAIR, *operands)
    assert [set(op.operands) for op in g.ops] == [{"x", "z"}, {"x", "z"}, {"x", "y", "z"}]
    assert g.ops[2].reads == (x, x)


def test_results_are_what_the_op_writes_or_updates() -> None:
    g, _, x = start()
    scores, experts = g.add_op("moe_route", x, g.weight("r", (8, WIDE), "float32"), top_k=2, normalize=False)
    assert (scores.name, experts.name) == ("moe_route.scores", "moe_route.experts")
    assert g.add_op(TOUCH, x) is x
    assert g.add_op(TOUCH, x) is x
    assert g.ops[-1].name == "touch.2"


def test_a_contract_may_read_nothing() -> None:
    g, tokens, _ = start()
    zeros = Operator(name="zeros", operands="-> y:f32[rows, 2]", attrs="rows")
    with g.chunk("a", over=tokens) as rows:
        y = g.add_op(zeros, rows=rows)
    assert y.shape == (rows, 2)
    assert g.ops[0].rate_rows == 1


# -- validation ----------------------------------------------------------------------------------------------------


def _read_before_write(g: Graph, t: Polynomial, x: Buffer) -> None:
    y = g.buffer("y", (t, WIDE), "float32")
    g.add_op(COPY, y, name="early")


def _carry_nobody_wrote(g: Graph, t: Polynomial, x: Buffer) -> None:
    g.add_op(COPY, g.carry("c", (t,), "float32"), name="early")


def _output_never_written(g: Graph, t: Polynomial, x: Buffer) -> None:
    g.output("y", (t,), "float32")
    g.add_op(COPY, x)


def _never_used(g: Graph, t: Polynomial, x: Buffer) -> None:
    g.buffer("y", (t,), "float32")
    g.add_op(COPY, x)


def _slice_used_outside(g: Graph, t: Polynomial, x: Buffer) -> None:
    with g.chunk("a", over=t):
        y = g.add_op(COPY, x, name="y")
    g.add_op(COPY, y, name="late")


def _stale_read(g: Graph, t: Polynomial, x: Buffer) -> None:
    y = g.add_op(COPY, x, name="y")
    z = g.add_op(OVER, y, name="z")
    g.add_alias(z, y)
    g.add_op(COPY, y, name="late")


def _not_in_place(g: Graph, t: Polynomial, x: Buffer) -> None:
    y = g.add_op(COPY, x, name="y")
    g.add_alias(g.add_op(COPY, y, name="z"), y)


def _stale_input(g: Graph, t: Polynomial, x: Buffer) -> None:
    g.add_alias(g.add_op(OVER, x, name="y"), x)
    g.add_op(COPY, x, name="late")


def _stale_second_write(g: Graph, t: Polynomial, x: Buffer) -> None:
    y, z = (g.buffer(name, (t, WIDE), "float32") for name in "yz")
    g.add_alias(z, y)
    for into in (z, y, z):
        g.add_op(COPY, x, out=into)
    g.add_op(COPY, y, name="late")


def _output_overwritten(g: Graph, t: Polynomial, x: Buffer) -> None:
    y = g.output("y", (t, WIDE), "float32")
    g.add_op(COPY, x, out=y)
    g.add_alias(g.add_op(OVER, y, name="z"), y)


def _stale_in_the_next_iteration(g: Graph, t: Polynomial, x: Buffer) -> None:
    y = g.add_op(COPY, x, name="y")
    with g.chunk("a", over=t):
        g.add_op(LOOK, y, name="all_of_y")
        z = g.add_op(COPY, x, name="z")
    g.add_alias(z, y)


def _slices_overwritten_by_the_next_iteration(g: Graph, t: Polynomial, x: Buffer) -> None:
    """Iteration 2 overwrites iteration 1's slice of an output before it writes its own."""
    y = g.output("y", (t, WIDE), "float32")
    with g.chunk("a", over=t):
        z = g.add_op(COPY, x, name="z")
        g.add_op(COPY, x, out=y, name="slice")
    g.add_alias(y, z)


def _slices_of_earlier_iterations_overwritten(g: Graph, t: Polynomial, x: Buffer) -> None:
    """Each iteration writes its slice of y again, but not those that iterations before it have overwritten."""
    y, z = (g.buffer(name, (t, WIDE), "float32") for name in "yz")
    g.add_op(COPY, x, out=y, name="first")
    with g.chunk("a", over=t):
        g.add_op(COPY, x, out=y, name="slice")
        g.add_op(LOOK, y, name="all_of_y")
        g.add_op(COPY, x, out=z, name="z")
    g.add_alias(z, y)


def _read_while_a_region_fills_it(g: Graph, t: Polynomial, x: Buffer) -> None:
    y = g.buffer("y", (t, WIDE), "float32")
    with g.chunk("a", over=t):
        g.add_op(COPY, x, out=y, name="slice")
        g.add_op(LOOK, y, name="all_of_y")


def _host_buffer_read_first(g: Graph, t: Polynomial, x: Buffer) -> None:
    """Without a tensor only the step fills it."""
    y = g.buffer("y", (t, WIDE), "float32", kind="host")
    g.add_op(COPY, y, name="early")
    g.add_op(COPY, x, out=y)


def _host_buffer_never_used(g: Graph, t: Polynomial, x: Buffer) -> None:
    g.buffer("y", (t, WIDE), "float32", kind="host")
    g.add_op(COPY, x)


def _double_buffer_read_first(g: Graph, t: Polynomial, x: Buffer) -> None:
    with g.chunk("a", over=t) as rows:
        slot = g.buffer("slot", (rows, WIDE), "float32", rotate=2)
        g.add_op(COPY, slot, name="use")
        g.add_op(COPY, x, out=slot, name="fetch")


def _slices_that_lie_elsewhere(g: Graph, t: Polynomial, x: Buffer) -> None:
    """Slice i of z lies over other slices of y, which later iterations read."""
    root = g.buffer("root", (4 * t, WIDE), "float64")
    y, z = (g.buffer(name, (t, WIDE), "float32") for name in "yz")
    g.add_op(COPY, x, out=y, name="first")
    with g.chunk("a", over=t):
        g.add_op(COPY, y, name="read")
        g.add_op(COPY, x, out=z, name="z")
    g.add_op(TOUCH, g.add_op(COPY, g.input("wide", (4 * t, WIDE), "float64"), out=root))
    g.add_alias(y, root)
    g.add_alias(z, root, offset=512)


def _slices_of_another_type(g: Graph, t: Polynomial, x: Buffer) -> None:
    """In place row by row, but rows of z have another shape and type than those of y."""
    y, z = g.buffer("y", (t, 2, WIDE), "float32"), g.buffer("z", (t, WIDE), "float64")
    over = Operator(name="wider", operands=f"x:a[T, *S] -> y:float64[T, {WIDE}]", inplace=(("y", "x"),))
    with g.chunk("a", over=t):
        g.add_op(COPY, g.input("pairs", (t, 2, WIDE), "float32"), out=y, name="first")
        g.add_op(over, y, out=z, name="slice")
    g.add_alias(z, y)


def _both_written_at_once(g: Graph, t: Polynomial, x: Buffer) -> None:
    two = Operator(name="two", operands="x:a[*T] -> y:a[*T] z:a[*T]")
    y, z = g.add_op(two, x, name="two")
    g.add_alias(z, y)
    finish(g, z)


def _written_beside_a_side_op(g: Graph, t: Polynomial, x: Buffer) -> None:
    """The copy is on its way while the main stream overwrites what it reads."""
    y = g.add_op(COPY, x, name="y")
    with g.stream("s"):
        kept = g.add_op(COPY, y, name="side")
    z = g.add_op(COPY, x, name="z")
    g.wait("s")
    g.add_op(PAIR, kept, z)
    g.add_alias(z, y)


def _overwritten_while_kept(g: Graph, t: Polynomial, x: Buffer) -> None:
    y, z = (g.add_op(COPY, x, name=name) for name in "yz")
    g.add_op(COPY, z, name="late")
    g.add_barrier(y, name="keep")
    g.add_alias(z, y)


def _written_in_the_loop_of_a_side_op(g: Graph, t: Polynomial, x: Buffer) -> None:
    """Buffers of a loop's side ops are held through the loop, though each iteration joins them."""
    with g.chunk("a", over=t):
        z = g.add_op(COPY, x, name="z")
        with g.stream("s"):
            kept = g.add_op(COPY, z, name="side")
        g.wait("s")
        g.add_op(COPY, kept)
        early = g.add_op(COPY, x, name="early")
    g.add_alias(early, kept)


def _in_place_beside_itself(g: Graph, t: Polynomial, x: Buffer) -> None:
    """In place is byte for byte: a result that begins elsewhere overwrites rows that are still to be read."""
    y = g.add_op(COPY, x, name="y")
    g.add_alias(g.add_op(OVER, y, name="z"), y, offset=512)


def _in_place_over_two_operands(g: Graph, t: Polynomial, x: Buffer) -> None:
    """The contract lets y overwrite x, but x is r as well."""
    mix = Operator(name="mix", operands="x:a[*T] r:b[*S] -> y:a[*T]", inplace=(("y", "x"),))
    y = g.add_op(COPY, x, name="y")
    g.add_alias(g.add_op(mix, y, y, name="z"), y)


def _whole_read_written_by_slices(g: Graph, t: Polynomial, x: Buffer) -> None:
    """In place holds only where the loop cuts both alike."""
    y = g.add_op(COPY, x, name="y")
    z = g.buffer("z", (t, WIDE), "float32")
    g.add_alias(z, y)
    whole = Operator(name="mix", operands="x@:a[*S] r:b[*T] -> y:b[*T]", inplace=(("y", "x"),))
    with g.chunk("a", over=t):
        g.add_op(whole, y, x, out=z)


def _wait_for_nobody(g: Graph, t: Polynomial, x: Buffer) -> None:
    with g.stream("s"):
        g.add_op(LOOK, x)
    g.wait("s")


def _never_joined(g: Graph, t: Polynomial, x: Buffer) -> None:
    with g.stream("s"):
        g.add_op(LOOK, x, name="side")


def _forked_outside_its_loop(g: Graph, t: Polynomial, x: Buffer) -> None:
    g.add_op(COPY, x)
    with g.chunk("a", over=t):
        with g.stream("s"):
            g.add_op(LOOK, x, name="side")
        g.wait("s")
        g.add_op(COPY, x)


INVALID: dict[str, tuple[str, Callable[[Graph, Polynomial, Buffer], None]]] = {
    "read before write": (
        r"early \(LINE\): reads y: float32\[tokens, 64\] before anything writes it \(LINE\)",
        _read_before_write,
    ),
    "a carry of no phase": (
        r"early \(LINE\): reads c: float32\[tokens\] before anything writes it",
        _carry_nobody_wrote,
    ),
    "output never written": (r"output y: float32\[tokens\] \(LINE\) is never written", _output_never_written),
    "never used": (r"y: float32\[tokens\] \(LINE\) is never used", _never_used),
    "a slice used outside": (r"late \(LINE\): touches y: .* \(LINE\) outside its region a", _slice_used_outside),
    "stale alias read": (r"alias of z and y: late \(LINE\) reads y after z \(LINE\) has overwritten it", _stale_read),
    "alias of what is read, not in place": (r"alias of z and y: z \(LINE\) reads y after z", _not_in_place),
    "alias of an input": (r"alias of y and x: late \(LINE\) reads x after y \(LINE\)", _stale_input),
    "a second write": (r"alias of z and y: late \(LINE\) reads y after copy.3 \(LINE\)", _stale_second_write),
    "an output overwritten": (r"z \(LINE\) overwrites the output y, which must hold", _output_overwritten),
    "the next iteration": (
        r"alias of z and y: all_of_y \(LINE\) reads y after z \(LINE\)",
        _stale_in_the_next_iteration,
    ),
    "slices lost in the next iteration": (
        r"alias of z and y: z \(LINE\) overwrites the output y",
        _slices_overwritten_by_the_next_iteration,
    ),
    "slices of earlier iterations": (
        r"alias of z and y: all_of_y \(LINE\) reads y after z \(LINE\) has overwritten it",
        _slices_of_earlier_iterations_overwritten,
    ),
    "read while a region fills it": (
        r"all_of_y \(LINE\): reads more of y: float32\[tokens, 64\] \(LINE\) than the slices that region a has written of "
        r"it so far; read it after the region",
        _read_while_a_region_fills_it,
    ),
    "a host buffer read first": (
        r"early \(LINE\): reads y: float32\[tokens, 64\] before anything writes it",
        _host_buffer_read_first,
    ),
    "a host buffer never used": (r"y: float32\[tokens, 64\] \(LINE\) is never used", _host_buffer_never_used),
    "a double buffer read first": (
        r"use \(LINE\): reads slot: float32\[a_rows, 64\] before anything writes it \(LINE\)",
        _double_buffer_read_first,
    ),
    "slices that lie elsewhere": (
        r"alias of z and y: read \(LINE\) reads y after z \(LINE\)",
        _slices_that_lie_elsewhere,
    ),
    "slices of another type": (r"alias of z and y: slice \(LINE\) reads y after slice", _slices_of_another_type),
    "overwritten while kept": (r"z \(LINE\) overwrites y, which keep \(LINE\) keeps", _overwritten_while_kept),
    "written in the loop of a side op": (
        r"early \(LINE\) touches early while side \(LINE\) may use",
        _written_in_the_loop_of_a_side_op,
    ),
    "in place beside itself": (r"alias of z and y: z \(LINE\) reads y", _in_place_beside_itself),
    "in place over two operands": (r"alias of z and y: z \(LINE\) reads y", _in_place_over_two_operands),
    "both written at once": (r"alias of two.z and two.y: two \(LINE\) writes both", _both_written_at_once),
    "written beside a side op": (
        r"z \(LINE\) touches z while side \(LINE\) may use y on stream 's'",
        _written_beside_a_side_op,
    ),
    "whole read, slices written": (r"alias of z and y: mix \(LINE\) reads y", _whole_read_written_by_slices),
    "wait without an op after it": (r"wait\(\) with no op after it", _wait_for_nobody),
    "a stream never joined": (r"side \(LINE\): stream 's' is never joined, yet it touches x", _never_joined),
    "a stream that leaves its loop": (
        r"side \(LINE\): stream 's' must fork and join inside region a",
        _forked_outside_its_loop,
    ),
}


@pytest.mark.parametrize("what", INVALID)
def test_invalid(what: str) -> None:
    message, register = INVALID[what]
    g, tokens, x = start()
    register(g, tokens, x)
    with pytest.raises(GraphError, match=message.replace("LINE", r"test_registrar\.py:\d+")):
        validate(g)


class Cells:
    """A random graph over buffers of [tokens, groups], told to Mosaic and executed cell by cell, loops for three iterations.

    Members of one group share their storage. A cell of it knows which member has written it last, so a read finds its
    value where all cells that it sees are its own.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.g, self.sound, self.at = Graph("cells"), True, dict[str, int]()
        self.dims = {name: self.g.dim(name) for name in ("tokens", "groups")}
        shape = tuple(self.dims.values())
        self.x = self.g.input("x", shape, "float32")
        self.members = {name: self.g.buffer(name, shape, "float32") for name in "abcd"}
        root = dict(zip("abcd", self.rng.choice(["aaaa", "aacc", "abbb", "abbd", "abcc", "abcc"]), strict=True))
        for name, of in root.items():
            if name != of:
                self.g.add_alias(self.members[name], self.members[of])
        self.storage = {of: dict.fromkeys(product(range(3), repeat=2), "") for of in root.values()}
        self.root = root
        body = [("write", name, "") for name in self.rng.sample("abcd", self.rng.randint(0, 4))] + self.body([], 0)
        for name in self.members:  # each is used, and by then whole in any case
            body += [("write", name, ""), ("read", name, "")]
        self.register(body)
        self.run(body)

    def body(self, open_loops: list[str], depth: int) -> list[Any]:
        found: list[Any] = []
        for _ in range(self.rng.randint(1, 4 - depth)):
            free = [dim for dim in self.dims if dim not in open_loops]
            if free and self.rng.random() < 0.5:
                over = self.rng.choice(free)
                found.append((over, self.body([*open_loops, over], depth + 1), ""))
            else:
                kind = self.rng.choice(["write", "write", "write", "read", "look", "move", "over", "touch"])
                found.append((kind, *self.rng.sample("abcd", 2)))
        return found

    def register(self, body: list[Any]) -> None:
        for kind, what, to in body:
            if kind in self.dims:
                with self.g.chunk(kind, over=self.dims[kind], name=f"{kind}{len(self.g.regions)}"):
                    self.register(what)
            elif kind == "write":
                self.g.add_op(COPY, self.x, out=self.members[what])
            elif kind in ("move", "over"):
                self.g.add_op(COPY if kind == "move" else OVER, self.members[what], out=self.members[to])
            else:
                self.g.add_op({"read": COPY, "look": LOOK, "touch": TOUCH}[kind], self.members[what])

    def run(self, body: list[Any]) -> None:
        for kind, what, to in body:
            if kind in self.dims:
                for self.at[kind] in range(3):
                    self.run(what)
                del self.at[kind]
                continue
            storage = self.storage[self.root[what]]
            seen = [
                cell
                for cell in storage
                if kind == "look" or all(cell["tg".index(d[0])] == i for d, i in self.at.items())
            ]
            if kind != "write":
                self.sound &= all(storage[cell] == what for cell in seen)
            if kind == "move" and self.root[what] == self.root[to]:
                self.sound = False  # over its own operand, without permission
            if kind in ("write", "move", "over"):
                written = what if kind == "write" else to
                self.storage[self.root[written]].update(dict.fromkeys(seen, written))


def test_random_graphs_are_valid_where_each_cell_that_is_read_holds_its_value() -> None:
    seen = Counter[bool]()
    for seed in range(400):
        case = Cells(seed)
        try:
            validate(case.g)
        except GraphError as error:
            assert not case.sound, (seed, error)
        else:
            assert case.sound, seed
        seen[case.sound] += 1
    assert min(seen[True], seen[False]) > 40, seen


def test_random_graphs_that_are_valid_have_plans_that_the_checker_accepts() -> None:
    """With loops of three iterations, with loops that run once, and with loops of either knob."""
    cases = [case for case in map(Cells, range(120)) if case.sound]
    for case in cases:
        point = Space(compile_template(lambda _, g=case.g: g), load_device("cpu")).at({"tokens": 384, "groups": 384})
        for rows in product((None, 128), repeat=len(case.g.tiles)):
            plan = plan_point(point, 1 << 30, identity={"model": "cells", "dtype": "float32"}, config=Config((), rows))
            assert plan.fits
    assert len(cases) > 20


def test_a_graph_without_ops_is_invalid() -> None:
    with pytest.raises(GraphError, match="graph 'empty' has no ops"):
        validate(Graph("empty"))


def test_a_missing_kernel_is_named() -> None:
    g, _, x = start()
    finish(g, x)
    validate(g)
    validate(g, kernels=("copy",))
    with pytest.raises(GraphError, match=r"finish \(test_registrar\.py:\d+\): no kernel 'copy'; there are linear"):
        validate(g, kernels=("linear",))


def test_legal_aliases() -> None:
    """In place, one after the other, at disjoint offsets, and slice by slice in a loop that cuts both alike."""
    g, tokens, x = start()
    y = g.add_op(COPY, x, name="y")
    z = g.add_op(OVER, y, name="z")
    g.add_alias(z, y)
    high = g.buffer("high", (tokens, WIDE), "float32")
    g.add_alias(high, z, offset=2 * z.bytes)
    w = g.buffer("w", (tokens, WIDE), "float32")
    g.add_alias(w, z)
    with g.chunk("a", over=tokens):
        g.add_op(OVER, z, out=w, name="slices")
        g.add_op(COPY, w, out=high, name="beside")
    finish(g, w)
    validate(g)
    assert g.root(w) is g.root(high) is y
    assert g.aliases[high.id] == (y, 2 * y.bytes)


# -- slices, regions, barriers, streams ----------------------------------------------------------------------------


def test_slices_have_factors_and_whole_operands_have_none() -> None:
    g, tokens, x = start()
    r = g.weight("r", (8, WIDE), "float32")
    with g.chunk("experts", over=tokens):
        scores, experts = g.add_op("moe_route", x, r, top_k=2, normalize=False)
        order, _ = g.add_op("moe_sort", experts, num_experts=8)
        rows = g.add_op("moe_gather", x, order, top_k=2)
        g.add_op("gather_rows", x, g.input("rows", (tokens,), "int64"))
        g.add_op("moe_combine", rows, order, scores, x)
    assert rows.shape == (2 * g.regions[0].rows, WIDE)
    _, sort, gather, chosen, combine = g.ops
    assert set(gather.slices) == {
        Slice("x", 0, "experts", 1),
        Slice("order", 0, "experts", 2),
        Slice("y", 0, "experts", 2),
    }
    assert Slice("order", 0, "experts", 2) in sort.slices
    assert {s.operand for s in chosen.slices} == {"rows", "y"}
    assert Slice("x", 0, "experts", 1) in combine.slices


def test_nested_regions_slice_each_dim_at_its_own_axis() -> None:
    g, tokens, x = start()
    vocabulary = g.dim("vocabulary", value=1000)
    table = g.weight("table", (vocabulary, WIDE), "float32")
    with g.chunk("rows", over=tokens) as rows:
        h = g.add_op(COPY, x, name="h")
        with g.chunk("tiles", over=vocabulary) as columns:
            scores = g.add_op("linear", h, table, name="scores")
    assert scores.shape == (rows, columns)
    inner = g.regions[1]
    assert (inner.parent, inner.chain) == (g.regions[0], tuple(g.regions))
    assert g.ops[1].region is inner
    assert set(g.ops[1].slices) == {
        Slice("x", 0, "rows", 1), Slice("weight", 0, "tiles", 1), Slice("y", 0, "rows", 1), Slice("y", 1, "tiles", 1),
    }  # fmt: skip
    assert g.ops[1].flops == 2 * rows * WIDE * columns


def test_outputs_are_filled_slice_by_slice() -> None:
    g, tokens, x = start()
    y = g.output("y", (tokens, WIDE), "float32")
    with g.chunk("a", over=tokens):
        g.add_op(COPY, x, out=y)
    validate(g)
    assert y.home is None
    assert set(g.ops[0].slices) == {Slice("x", 0, "a", 1), Slice("y", 0, "a", 1)}


def test_scratch_is_private_to_its_op() -> None:
    g = Graph("test", backend="cuda")
    q = g.input("q", (g.dim("tokens"), WIDE), "float32")
    g.add_op(
        "attention",
        q,
        q,
        q,
        g.input("cu", (2,), "int32"),
        head_size=32,
        scale=1.0,
        span=g.dim("span"),
    )
    scratch = g.ops[0].operands["scratch"]
    assert (scratch.kind, scratch.shape, scratch.dtype) == ("scratch", (256,), "uint8")
    assert scratch in g.ops[0].writes and scratch not in g.ops[0].reads


def test_barriers_remember_where_they_were_put() -> None:
    g, _, x = start()
    y = g.add_op(COPY, x)
    since = g.mark()
    g.add_op(COPY, x)
    g.add_barrier(y, since=since)
    g.add_barrier(x, y)
    assert [(b.name, b.start, b.end) for b in g.barriers] == [("barrier", 1, 2), ("barrier.2", None, 2)]
    assert g.barriers[0].source.startswith("test_registrar.py:")


def test_streams_fork_from_the_last_main_op_and_join_at_the_next() -> None:
    g, _, x = start()
    g.add_op(COPY, x)
    g.add_op(COPY, x)
    with g.stream("copies"):
        g.add_op(COPY, x, name="side")
        g.add_op(COPY, x, name="side")
    g.add_op(COPY, x)
    g.wait("copies")
    g.add_op(COPY, x, name="join")
    with g.stream("copies"):
        g.add_op(COPY, x, name="again")
    g.wait("copies")
    g.add_op(COPY, x, name="join")
    assert g.edges == [Edge("fork", 1, 2), Edge("wait", 3, 5), Edge("fork", 5, 6), Edge("wait", 6, 7)]
    assert [op.stream for op in g.ops] == ["main"] * 2 + ["copies"] * 2 + ["main"] * 2 + ["copies", "main"]
    validate(g)


def test_a_wait_can_be_put_off_until_a_buffer_is_updated() -> None:
    """Ops that read it, write others or are on the stream itself do not wait."""
    g, _, x = start()
    y, z = (g.add_op(COPY, x, name=name) for name in "yz")
    with g.stream("s"):
        g.add_op(COPY, y, name="side")
    g.wait("s", updates=y)
    g.add_op(UPDATE, z, name="other")
    g.add_op(COPY, y, name="reads")
    with g.stream("s"):
        g.add_op(LOOK, x, name="beside")
    with pytest.raises(GraphError, match=r"wait\(\) with no op after it"):
        validate(g)
    g.add_op(UPDATE, y, name="join")
    g.wait("s")
    g.add_op(UPDATE, y, name="later")
    assert g.edges == [Edge("fork", 1, 2), Edge("fork", 4, 5), Edge("wait", 2, 6), Edge("wait", 5, 7)]
    validate(g)


def test_a_stream_before_any_main_op_needs_no_fork() -> None:
    g, _, x = start()
    with g.stream("s"):
        g.add_op(COPY, x, name="side")
    g.wait("s")
    g.add_op(COPY, x, name="join")
    assert g.edges == [Edge("wait", 0, 1)]
    validate(g)


UPDATE = Operator(name="update", operands="x!:a[*T]")


@pytest.mark.parametrize("race", ["a read of its result", "an update of what it reads", "another stream"])
def test_what_a_side_op_touches_is_left_alone_until_it_is_waited_for(race: str) -> None:
    """Each names the op that comes too early; after the wait it is in order."""
    for waited in (False, True):
        g, _, x = start()
        y = g.add_op(COPY, x, name="y")
        with g.stream("s"):
            side = g.add_op(COPY, y, name="side")
        if waited:
            g.wait("s")
            g.add_op(LOOK, x, name="join")
        if race == "a read of its result":
            g.add_op(LOOK, side, name="early")
        elif race == "an update of what it reads":
            g.add_op(UPDATE, y, name="early")
        else:
            with g.stream("t"):
                g.add_op(COPY, side, name="early")
            g.wait("t")
        g.wait("s")
        g.add_op(LOOK, x, name="end")
        if waited:
            validate(g)
            continue
        with pytest.raises(GraphError, match=r"early \(.*touches (side|y): .* while side \(.*on stream 's'; wait"):
            validate(g)


@pytest.mark.parametrize(
    "edge", [("wait", 2, 1), ("fork", 3, 2), ("wait", 2, 77), ("fork", -1, 2), ("wait", 1, 3), ("fork", 2, 3)]
)
def test_edges_lead_forward_between_main_and_a_side_stream(edge: tuple[Any, int, int]) -> None:
    """No graph that is read from a file has a cycle."""
    g, _, x = start()
    for _ in range(2):
        g.add_op(COPY, x)
    with g.stream("s"):
        g.add_op(COPY, x)
    g.wait("s")
    g.add_op(COPY, x)
    plain = json.loads(to_json(g))
    validate(from_json(json.dumps(plain)))
    plain["edges"].append(edge)
    with pytest.raises(GraphError, match=rf"edge '{edge[0]}' from op {edge[1]} to op {edge[2]}"):
        validate(from_json(json.dumps(plain)))


# -- programs ------------------------------------------------------------------------------------------------------


def test_a_program_keeps_values_and_bounds_of_dims_that_shape_its_state() -> None:
    """A phase that never mentions them still plans the other phase's state."""

    def write(g: Graph) -> None:
        g.dim("kept_at_most", value=7)
        kept = g.dim("kept", at_most="kept_at_most")
        g.add_op(TOUCH, g.state("cache", (kept, 4), "float32"))

    def other(g: Graph) -> None:
        finish(g, g.input("x", (g.dim("tokens"),), "float32"))

    program = Program("p")
    program.add_phase("write", write)
    program.add_phase("other", other)
    g = program.graph("other")
    assert [(name, d.at_most, d.value) for name, d in g.dims.items()] == [
        ("kept_at_most", None, 7), ("kept", "kept_at_most", None), ("tokens", None, None),
    ]  # fmt: skip
    assert [b.name for b in g.buffers] == ["cache", "x", "out"]


def test_phases_and_steps_have_one_name_each_and_agree_about_what_they_share() -> None:
    program = Program("p")
    program.add_phase("a", lambda g: finish(g, g.weight("w", (4,), "float32")))
    program.add_phase("b", lambda g: finish(g, g.weight("w", (5,), "float32")))
    with pytest.raises(GraphError, match="has a phase or step 'a' already"):
        program.add_phase("a", lambda g: None)
    with pytest.raises(UnknownName, match="unknown phase 'c'"):
        program.add_step("both", ("a", "c"))
    with pytest.raises(UnknownName, match="unknown step 'd'"):
        program.graph("d")
    with pytest.raises(GraphError, match=r"w \(.*asked for a weight float32\[5\], but it is a weight float32\[4\]"):
        program.graph("a")


def test_a_joined_step_prefixes_what_is_a_phases_own_and_carries_the_rest() -> None:
    program = Program("p")

    def make(g: Graph) -> None:
        g.add_op(COPY, g.input("x", (g.dim("n"),), "float32"), out=g.carry("c", (g.dim("n"),), "float32"))

    program.add_phase("make", make)
    program.add_phase("use", lambda g: finish(g, g.carry("c", (g.dim("n"),), "float32")))
    program.add_step("both", ("make", "use"))
    g = program.graph("both")
    assert [op.name for op in g.ops] == ["make/copy", "use/finish"]
    assert [b.name for b in g.buffers] == ["make/x", "c", "use/out"]
    assert program.steps == ("make", "use", "both")
    with pytest.raises(GraphError, match=r"reads c.* before anything writes it"):
        program.graph("use")


# -- serialisation and drawing -------------------------------------------------------------------------------------


def small() -> Graph:
    """Everything that a graph may hold: nested regions, aliases, barriers, streams, choices, rotation, own contracts."""
    g, tokens, x = start()
    g.choice("head", ("plain", "fused"))
    half = g.dim("half", at_most="tokens")
    y = g.add_op(COPY, x, name="y")
    with g.stream("side"):
        g.add_op(LOOK, y, name='quoted "name" | pipe')
    with g.scope("layers.0"), g.chunk("a", over=tokens), g.chunk("b", over=half):
        g.buffer("slot", (half, 3), "int32", rotate=2, tensor=None)
        g.add_op(TOUCH, g["layers.0/slot"], name="fill")
    g.wait("side")
    z = g.add_op(OVER, y, name="z")
    g.add_alias(z, y)
    g.add_barrier(x, since=1)
    g.add_op(
        "linear", z, g.weight("w", (WIDE, WIDE), "float32", tensor="model.w"), out=g.output("out", x.shape, x.dtype)
    )
    return g


GRAPHS: dict[str, Callable[[], Graph]] = {
    "small": small,
    **{name: (lambda name=name: load(name).graph(phase=Phase(logits=LOGITS))) for name in PRESETS},  # type: ignore[misc]
    "toy": lambda: toy.program().graph("commit_then_denoise"),
}


SIZES = ("sdar-4b", "sdar-8b", "fast-dllm-v2-7b", "dream-7b")  # little but other numbers in the graphs of others


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak) if name in SIZES else name for name in GRAPHS]
)
def test_a_graph_survives_json_byte_for_byte(name: str) -> None:
    g = GRAPHS[name]()
    text = to_json(g)
    assert to_json(GRAPHS[name]()) == text, "registering twice must give the same bytes"
    back = from_json(text)
    assert to_json(back) == text
    assert json.loads(text)["schema"] == "mosaic.graph/1"
    assert [b.shape for b in back.buffers] == [b.shape for b in g.buffers]
    assert [op.flops for op in back.ops] == [op.flops for op in g.ops]


@pytest.mark.parametrize("name", ["llada-8b", "toy"])
def test_lifetimes_of_a_graph_read_back_are_the_same(name: str) -> None:
    from mosaic.planner.compiling import compile_body
    from mosaic.planner.lifetimes import derive

    g = GRAPHS[name]()
    bodies = [compile_body(graph) for graph in (g, from_json(to_json(g)))]
    first, second = (derive(body, set(g.tiles)) for body in bodies)
    assert first == second


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema":"mosaic.plan/1"}', "nonsense"])
def test_what_is_no_graph_is_refused(text: str) -> None:
    with pytest.raises(GraphError, match="not a graph"):
        from_json(text)


def test_a_damaged_graph_is_refused() -> None:
    plain = json.loads(to_json(small()))
    for key in plain:
        damaged = {**plain, key: None} if key == "buffers" else {k: v for k, v in plain.items() if k != key}
        with pytest.raises(GraphError, match=r"not a graph|damaged"):
            from_json(json.dumps(damaged))
    plain["ops"][0]["reads"] = [10**6]
    with pytest.raises(GraphError, match="damaged graph: IndexError"):
        from_json(json.dumps(plain))


@pytest.mark.parametrize("name", GRAPHS)
def test_drawings_are_balanced_and_mention_every_op(name: str) -> None:
    g = GRAPHS[name]()
    dot, mermaid = to_dot(g), to_mermaid(g)
    assert unquoted(dot).count("{") == unquoted(dot).count("}") == 1 + len(g.regions)
    assert dot.count('"') % 2 == dot.count('\\"') % 2
    blocks = [line.split()[0] for line in mermaid.splitlines()]
    assert blocks.count("subgraph") == blocks.count("end") == len(g.regions)
    for op in g.ops:
        assert op.name.replace('"', '\\"') in dot
        assert f'op{op.index}["{op.name.replace(chr(34), chr(39)).replace("|", "/")}' in mermaid
    pytest.importorskip("networkx")
    flow = to_networkx(g)
    assert list(flow.nodes) == [op.name for op in g.ops]
    assert all(a != b for a, b in flow.edges())


def test_networkx_is_asked_for_by_name_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "networkx", None)
    g = load("llada-8b").graph()
    assert to_dot(g) and to_mermaid(g)
    with pytest.raises(MissingExtra, match=r"a graph for networkx needs networkx: pip install 'mosaic-dllm\[viz\]'"):
        to_networkx(g)


def unquoted(dot: str) -> str:
    return re.sub(r'"(\\.|[^"\\])*"', "", dot)


# -- one name for an operator everywhere ---------------------------------------------------------------------------


def test_operators_are_the_files_of_their_room() -> None:
    folder = Path(operators.__file__).parent
    assert tuple(sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")) == OPERATORS
    assert all(contract(name).name == name for name in OPERATORS)


def test_operators_are_the_kernels() -> None:
    for name in OPERATORS:
        assert load_kernel(name).module.__name__ == f"mosaic.kernels.{name}"
        kernels = {way.kernel for way in contract(name).on("cuda")}
        carried_out_by = {"prefix_attention": "kv_attention"}.get(name, name)
        assert f"mosaic.kernels.cuda.{carried_out_by}" in kernels and all(map(find_spec, kernels))


def test_launchers_take_what_the_records_list() -> None:
    """By the record's names; what may be left out has the record's value, or None. Who serves some launches takes theirs."""
    triton = pytest.importorskip("triton")
    for name in OPERATORS:
        record = contract(name)
        optional = {read.rstrip("?"): None for read in record.reads if read.endswith("?")} | dict(record.defaults)
        given = {read.rstrip("?") for read in record.reads} | {*record.writes}
        given |= {attr.partition("=")[0] for attr in record.attrs.split()}
        takers = [(record.name, reference_of(record), given - {*record.writes})]
        for way in record.implementations:
            if way.capability is not None and not triton.__version__.startswith("3.6."):
                continue  # written for that version
            kernel = kernel_of(way)
            needed = given if way.serves is None else given - optional.keys()
            takers.append((f"{name} by {way.name}", getattr(kernel, "bind", None) or launcher_of(kernel), needed))
        for said, function, listed in takers:
            taken = inspect.signature(function).parameters
            if not any(one.kind is one.VAR_KEYWORD for one in taken.values()):
                assert listed <= taken.keys(), said
            for one in taken.values():
                if one.name in optional:
                    assert one.default == optional[one.name], (said, one.name)
                elif one.name not in given and one.kind is not one.VAR_KEYWORD:
                    assert one.default is not one.empty, (said, one.name)


def test_scratch_is_that_of_a_backend() -> None:
    with pytest.raises(UnknownName, match="unknown backend 'tpu'"):
        contract("linear").scratch_bytes("tpu", {}, {})
    assert {contract("silu_mul").scratch_bytes(backend, {}, {}) for backend in BACKENDS} == {0}


def test_contracts_say_only_what_they_have() -> None:
    for name in OPERATORS:
        rule = contract(name)
        reads = {read.rstrip("?") for read in rule.reads}
        assert set(rule.updates) <= reads and rule.whole <= reads
        assert not reads & set(rule.writes)
        assert all(w in rule.writes and r in reads for w, r in rule.inplace)
        assert rule.writes or rule.updates
