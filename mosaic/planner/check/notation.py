"""The letters in which the checker's record of operators is written, and their parsing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from mosaic.planner.check.reading import BOOLEAN, INTEGER, NUMBER, TEXT, Types

NONE: Final = "none"
SCRATCH: Final = "scratch"  # an operand that any kernel may have, and writes

Rule = tuple[str, str, str]  # (relation, product, product)


class Way(NamedTuple):
    """An implementation that a CUDA plan may choose, and the launches that it takes."""

    name: str
    takes: str = ""  # the launches in words; empty: every launch
    absent: tuple[str, ...] = ()  # attributes that are not there, or 0, and operands that are not
    multiple: tuple[str, int, int] = ("", 1, 1)  # an attribute, of what it is a multiple, and its limit
    dtypes: tuple[str, frozenset[str]] = ("", frozenset())  # operands, and what they may be in
    elements: tuple[str, int] = ("", 0)  # an operand, and how many elements it has; none: any number
    capability: int = 0  # the compute capability of the only cards that it runs on; 0: any
    invariant: str = ""  # what a batch-invariant plan may take in its stead, on the same cards and launches


class Operator(NamedTuple):
    """The record of a shipped operator's launch, in letters.

    `shapes` lists operands as `name:dtype=axes`; `?` marks an optional one. An axis is a letter, bound where it first
    occurs, or a product of letters, attributes and numbers, with `+1` at most; `*T` is any number of axes. Of dtypes, a
    lower-case letter is bound where it first occurs. `order` of the table is that in which letters can be bound.
    """

    shapes: str
    reads: str
    writes: str
    attrs: str = ""  # `name:type`; `?` as above, and behind it what the number is where it is not given
    flops: str = "0"  # a product, or a sum of products
    whole: str = ""  # letters that a loop never slices
    # operands whose bytes count, repeated where they count twice; by default all, and updates twice; `name=axes` counts
    # only the elements of these axes
    moved: str = ""
    host: str = ""  # operands that may lie in host memory, one of them at a time
    rules: tuple[Rule, ...] = ()
    inplace: str = ""  # `written/read`: what the kernel may write over an operand that it still reads
    # where the shipped step shows its dims: a letter, and the product that it is, of a dim and attributes
    shown: tuple[tuple[str, str], ...] = ()
    ways: tuple[Way, ...] = ()  # what a CUDA plan chooses from, where there are several
    invariant: str = ""  # the one that a batch-invariant CUDA plan takes, where not every one will do; NONE: none will
    # letters that follow from attributes: one more than a quotient of two
    quotients: tuple[tuple[str, str, str], ...] = ()


_ATTRIBUTE: Final[Mapping[str, Types]] = {"n": INTEGER, "x": NUMBER, "b": BOOLEAN, "s": TEXT}

Product = tuple[tuple[str, ...], int]  # factors, and what is added to their product


class Operand(NamedTuple):
    """One operand, parsed."""

    name: str
    dtype: str
    axes: tuple[str | Product, ...]  # a name with `*` for any number of axes, or a product
    optional: bool


class Known(NamedTuple):
    """An operator, parsed."""

    operands: tuple[Operand, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    attrs: Mapping[str, Types]
    optional: frozenset[str]
    defaults: Mapping[str, int]  # of attributes that are not given
    flops: tuple[tuple[str, ...], ...]  # the factors of each term
    whole: tuple[str, ...]
    moved: tuple[tuple[str, tuple[Product, ...]], ...]  # the axes that count; none: all
    host: frozenset[str]
    rules: tuple[Rule, ...]
    inplace: tuple[tuple[str, str], ...]  # (written, read)
    silent: tuple[str, ...]  # attributes that no shape, FLOPs or bytes tell
    fills: tuple[str, ...]  # what it writes, scratch included
    names: frozenset[str]  # all operands that it may have
    shown: tuple[tuple[str, str], ...]
    ways: Mapping[str, Way]
    invariants: Mapping[str, Way]  # what a batch-invariant plan chooses from, where not every one will do
    invariant: str
    quotients: tuple[tuple[str, str, str], ...]  # (letter, dividend, divisor)


def product_of(text: str) -> Product:
    """Parse a product.

    Examples
    --------
    >>> product_of("C*top_k"), product_of("E+1")
    ((('C', 'top_k'), 0), (('E',), 1))
    """
    factors, _, added = text.partition("+")
    return tuple(factors.split("*")), int(added or 0)


def parsed(operator: Operator) -> Known:
    attrs, optional, defaults = {}, set(), {}
    for entry in operator.attrs.split():
        label, _, kind = entry.partition(":")
        name, may, default = label.partition("?")
        attrs[name] = _ATTRIBUTE[kind]
        if may:
            optional.add(name)
        if default:
            defaults[name] = int(default)
    reads, writes = (tuple(side.replace("?", "").split()) for side in (operator.reads, operator.writes))
    said = re.split(r"[^A-Za-z_]+", " ".join((operator.shapes, operator.flops, operator.moved)))
    return Known(
        operands=tuple(map(_parse_operand, operator.shapes.split())), reads=reads, writes=writes, attrs=attrs,
        optional=frozenset(optional), defaults=defaults, flops=tuple(tuple(term.split("*")) for term in operator.flops.split("+")),
        whole=tuple(operator.whole.split()),
        moved=tuple(map(_parse_moved, operator.moved.split() or (*reads, *writes))), host=frozenset(operator.host.split()),
        rules=operator.rules, inplace=tuple(map(_parse_pair, operator.inplace.split())),
        silent=tuple(name for name in attrs if name not in said), fills=(*writes, SCRATCH),
        names=frozenset({*reads, *writes, SCRATCH}), shown=operator.shown,
        ways={way.name: way for way in operator.ways}, invariants=_invariants(operator), invariant=operator.invariant,
        quotients=operator.quotients,
    )  # fmt: skip


def _invariants(operator: Operator) -> Mapping[str, Way]:
    if operator.invariant in ("", NONE):
        return {}
    special = {way.invariant: way._replace(name=way.invariant) for way in operator.ways if way.invariant}
    return {**special, operator.invariant: Way(operator.invariant)}


def _parse_pair(entry: str) -> tuple[str, str]:
    written, _, read = entry.partition("/")
    return written, read


def _parse_moved(entry: str) -> tuple[str, tuple[Product, ...]]:
    name, _, axes = entry.partition("=")
    return name, tuple(map(product_of, axes.split(","))) if axes else ()


def _parse_operand(entry: str) -> Operand:
    label, _, axes = entry.partition("=")
    name, _, dtype = label.partition(":")
    parsed = tuple(axis if axis[0] == "*" else product_of(axis) for axis in axes.split(","))
    return Operand(name=name.rstrip("?"), dtype=dtype, axes=parsed, optional=name[-1] == "?")
