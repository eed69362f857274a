"""Random values of inputs, weights, state and constants, drawn by what a declaration says of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from .language import Declare, Program, declarations
from .naive import INTEGERS

__all__ = ["GIVEN", "values_of"]

GIVEN = ("input", "weight", "state", "external")
DTYPES = {"float64": torch.float64, "float32": torch.float32, **INTEGERS}


def values_of(program: Program, seed: int, kinds: tuple[str, ...] = (*GIVEN, "host")) -> dict[str, Tensor]:
    """Values by buffer, in the declared dtypes; each depends on the seed and its own name alone."""
    return {
        name: _draw(program, declared, random.Random(f"{seed}/{name}"))
        for name, declared in declarations(program.body).items()
        if declared.kind in kinds and declared.fill
    }


def _draw(program: Program, s: Declare, rng: random.Random) -> Tensor:
    shape = [program.value(size) for size in s.shape]
    what, *arguments = s.fill.split(":")
    integers = _INTEGERS.get(what)
    if integers is not None:
        return torch.tensor(integers(program, shape[0], arguments, rng), dtype=DTYPES[s.dtype]).reshape(shape)
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    if what == "matrix":
        drawn *= shape[-1] ** -0.5
    elif what == "around one":
        drawn = 1 + 0.3 * drawn
    elif what == "frequencies":
        drawn = drawn.abs() + 0.01
    return drawn.to(DTYPES[s.dtype])


def _positions(program: Program, count: int, arguments: list[str], rng: random.Random) -> list[int]:
    return [rng.randrange(64) for _ in range(count)]


def _rows(program: Program, count: int, arguments: list[str], rng: random.Random) -> list[int]:
    """Row numbers of a dim, or below a number."""
    below = program.dims[arguments[0]].value if arguments[0] in program.dims else int(arguments[0])
    return [rng.randrange(below) for _ in range(count)]


def _bounds(program: Program, count: int, arguments: list[str], rng: random.Random) -> list[int]:
    """Bounds of sequences that share out the rows of a dim, none empty as far as there are rows."""
    total = program.dims[arguments[0]].value
    cuts = rng.sample(range(1, total), min(count - 2, total - 1))
    return sorted([0, *cuts, *[total] * (count - 1 - len(cuts))])


def _slots(program: Program, count: int, arguments: list[str], rng: random.Random) -> list[int]:
    """Distinct rows of a dim."""
    return rng.sample(range(program.dims[arguments[0]].value), count)


def _owned(program: Program, arguments: list[str]) -> list[list[tuple[int, int, int, int]]]:
    """Extents of sequences that share out the rows of a dim, in some of which tokens were dropped at the start or the end.

    Drawn by the last argument alone, so that all operands that speak of them agree.
    """
    rows, sequences, rng = program.dims[arguments[0]].value, int(arguments[1]), random.Random(arguments[2])
    many = min(program.dims["extents"].value, rows)
    cuts = [0, *sorted(rng.sample(range(1, rows), many - 1)), rows]
    whose = sorted([*range(min(sequences, many)), *(rng.randrange(sequences) for _ in range(many - sequences))])
    found: list[list[tuple[int, int, int, int]]] = [[] for _ in range(sequences)]
    length = [0] * sequences
    spans = rng.sample([*pairwise(cuts)], many)
    for sequence, (start, end) in zip(whose, spans, strict=True):
        before = rng.randrange(2) if end - start > 2 else 0
        found[sequence].append((start, end - start, length[sequence], before))
        length[sequence] += end - start - before - (rng.randrange(2) if end - start > 2 else 0)
    return found


def _extents(program: Program, count: int, arguments: list[str], rng: random.Random) -> list[list[int]]:
    """The extents of all sequences, then extents of no sequence."""
    found = [[*extent] for extents in _owned(program, arguments) for extent in extents]
    return [*found, *[[1 << 40, 1, 0, 0]] * (count - len(found))]


def _cu_extents(program: Program, count: int, arguments: list[str], rng: random.Random) -> list[int]:
    return [0, *accumulate(map(len, _owned(program, arguments)))]


def _seen(program: Program, count: int, arguments: list[str], rng: random.Random) -> list[int]:
    """Keys that sequences see among the keys with rows: at least one, if there is one."""
    rows = [
        first + rows - before - (rows > 2) if extents else 0
        for extents in _owned(program, arguments)
        for _, rows, first, before in extents[-1:] or [(0, 0, 0, 0)]
    ]
    return [rng.randint(min(1, most), max(most, min(1, most))) for most in rows]


def _selected(program: Program, count: int, arguments: list[str], rng: random.Random) -> list[list[int]]:
    """Rows of counts and ascending pages for each of some groups: the first page always, perhaps more than there are keys."""
    pages, groups = map(int, arguments)
    found = []
    for _ in range(count * groups):
        chosen = [0, *sorted(rng.sample(range(1, 9), rng.randrange(pages)))]
        found.append([len(chosen), *chosen, *[1 << 20] * (pages - len(chosen))])
    return found


_INTEGERS: Mapping[str, Callable[[Program, int, list[str], random.Random], Sequence[int] | Sequence[list[int]]]] = {
    "positions": _positions, "rows": _rows, "bounds": _bounds, "slots": _slots, "extents": _extents,
    "cu_extents": _cu_extents, "seen": _seen, "selected": _selected,
}  # fmt: skip


def doubled(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies with floats in float64, for the interpreter to work on."""
    return {
        name: value.to(torch.float64, copy=True) if value.is_floating_point() else value.clone()
        for name, value in values.items()
    }
