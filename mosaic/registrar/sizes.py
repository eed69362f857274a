"""The reads, writes and costs of an op, as functions of symbolic sizes alone.

Layers repeat the same computations, as do the graphs of other choices; symbolic arithmetic is slow, so results are
cached. Equal results are one object, so that looking them up again compares identities.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias

from mosaic.errors import GraphError
from mosaic.registrar.operator import Dim, Operator, Spec, Work
from mosaic.registrar.polynomial import Polynomial

_KEPT: Final = 4096
"""Results that each computation caches, for layers and graphs that repeat it."""


Loops: TypeAlias = tuple[tuple[Polynomial, Polynomial], ...]
"""For nested regions, outermost first: the dim of each, and the rows of one iteration."""
Seen: TypeAlias = tuple[tuple[str, Spec, int], ...]
"""Operands: name, spec, and the number of open loops that hold its home."""
Specs: TypeAlias = tuple[tuple[str, Spec], ...]
Attributes: TypeAlias = tuple[tuple[str, Any], ...]
Cut: TypeAlias = tuple[str, int, int, int | None, Dim]
"""One slicing of an operand: its name, axis, loop, factor (none: the axis cannot be sliced) and the sliced dim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The reads of one launch in one iteration of the open loops, and its work; or, in `refused`, why there is none."""

    specs: Specs
    cuts: tuple[Cut, ...]
    work: Work | None
    refused: str = ""


@lru_cache(maxsize=_KEPT)
def asked(rule: Operator, reads: Seen, loops: Loops, attrs: Attributes) -> Asked:
    """Return the reads of a launch, and the operator's work for them."""
    specs, cuts = _iteration(rule, reads, loops)
    if any(factor is None for *_, factor, _ in cuts):
        return Asked(specs=specs, cuts=cuts, work=None)
    try:
        return Asked(specs=specs, cuts=cuts, work=rule.work(**dict(specs), **dict(attrs)))
    except GraphError as error:
        shown = ", ".join(f"{key} {spec}" for key, spec in specs)
        return Asked(specs=specs, cuts=cuts, work=None, refused=f"{rule.name}({shown}): {error}")


@dataclass(frozen=True, slots=True)
class Results:
    """The writes of one launch in one iteration, and its scratch bytes."""

    scratch: Dim
    cuts: tuple[Cut, ...]


@lru_cache(maxsize=_KEPT)
def results(backend: str, rule: Operator, reads: Specs, writes: Seen, loops: Loops, attrs: Attributes) -> Results:
    """Return the writes of a launch, and its scratch."""
    specs, cuts = _iteration(rule, writes, loops)
    scratch = rule.scratch_bytes(backend, dict(reads + specs), dict(attrs))
    if scratch != 0:
        cuts += _iteration(rule, (("scratch", Spec((scratch,), "uint8"), len(loops)),), loops)[1]
    return Results(scratch, cuts)


def _iteration(rule: Operator, operands: Seen, loops: Loops) -> tuple[Specs, tuple[Cut, ...]]:
    """Operands as one iteration of some nested loops sees them, and their slices."""
    views = {key: view(spec, loops, inside, key in rule.whole) for key, spec, inside in operands}
    return (
        tuple((key, found.seen) for key, found in views.items()),
        tuple((key, *cut) for key, found in views.items() for cut in found.cuts),
    )


@dataclass(frozen=True, slots=True)
class View:
    """An operand as one iteration of some nested loops sees it, and its slices: axis, loop, factor (none: the axis
    cannot be sliced) and the sliced dim."""

    seen: Spec
    cuts: tuple[tuple[int, int, int | None, Dim], ...]


@lru_cache(maxsize=_KEPT)
def view(spec: Spec, loops: Loops, inside: int, whole: bool) -> View:
    """Return an operand as an iteration sees it: loops inside its home slice it, unless the operator takes it whole.

    Its home lies in the outermost `inside` loops.
    """
    cuts: list[tuple[int, int, int | None, Dim]] = []
    shape = spec.shape
    for index, (over, rows) in enumerate(loops):
        outside = index >= inside
        if whole and outside:
            break
        for axis, dim in enumerate(shape):
            factor = _factor(dim, over if outside else rows)
            if factor is not None or (outside and _has(dim, over)):
                cuts.append((axis, index, factor, dim))
        if outside:
            shape = tuple(dim if isinstance(dim, int) else dim.at({str(over): rows}) for dim in shape)
    return View(Spec(shape, spec.dtype), tuple(cuts))


def _has(dim: Dim, over: Polynomial) -> bool:
    return isinstance(dim, Polynomial) and str(over) in dim.names


def _factor(dim: Dim, of: Polynomial) -> int | None:
    """The integer f with dim == f * of, if there is one."""
    factor = dim / of if isinstance(dim, Polynomial) else None
    return factor if isinstance(factor, int) else None
