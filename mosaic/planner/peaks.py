"""The peak formula: the live sets that can be the largest, as counts of buffer sizes.

Each point of a step has a live set; its bytes are a linear form in the sizes
of the buffers in it. Live sets contained in others are dropped, whatever the
sizes: what is left, a handful of forms, is the model's memory law. Evaluating
it gives the lower bound of any offset assignment, exactly, rounding included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from mosaic.planner.body import Body
from mosaic.planner.lifetimes import Lifetimes

ALIGNMENT = 512
"""Bytes to which sizes in the workspace are rounded before lower bound and peak are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakFormula:
    """Undominated live sets of one body under one set of active regions.

    Parameters
    ----------
    roots
        Buffer ids of the workspace's roots, ascending.
    classes
        Size class of each root.
    counts
        [forms, classes]: how many live buffers of each size class a form has.
    at
        Op index at which each form first occurs.
    size_table, offset_table, rotates
        [members, monomials]: bytes of one slot and alias offset of every member of every class, and its slots; `begins`
        has the position of each class's first member.
    plain
        Whether every class is one member at offset 0 with one slot.
    """

    roots: npt.NDArray[np.int64]
    classes: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    at: tuple[int, ...]
    size_table: npt.NDArray[np.int64]
    offset_table: npt.NDArray[np.int64]
    rotates: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]
    plain: bool

    def class_sizes(self, monomials: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the bytes of each size class, rounded up to `ALIGNMENT` per slot."""
        slots = (self.size_table @ monomials + (ALIGNMENT - 1)) & -ALIGNMENT
        if self.plain:
            return slots
        extents = self.offset_table @ monomials + slots * self.rotates
        return extents if len(extents) == len(self.begins) else np.maximum.reduceat(extents, self.begins)

    def values(self, monomials: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the bytes of every form; their maximum is the lower bound of the workspace."""
        return self.counts @ self.class_sizes(monomials)

    def root_sizes(self, monomials: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the bytes of every workspace root, in the order of `roots`."""
        return self.class_sizes(monomials)[self.classes]


def peak_formula(body: Body, life: Lifetimes) -> PeakFormula:
    """Sweep a body's lifetimes once and keep the undominated live sets. O(ops x classes + forms^2)."""
    roots = [root for root, _ in body.groups]
    classes, members = body.size_classes
    flat = [member for key in members for member in key]
    begins = np.cumsum([0] + [len(key) for key in members])[:-1]
    delta = np.zeros((len(body.ops) + 1, len(members)), dtype=np.int64)
    np.add.at(delta, ([life.starts[b] for b in roots], classes), 1)
    np.add.at(delta, ([life.ends[b] for b in roots], classes), -1)
    for b, c in zip(roots, classes, strict=True):
        for low, high in life.gaps[b]:
            delta[low, c] -= 1
            delta[high, c] += 1
    counts, at = _undominated(np.cumsum(delta[:-1], axis=0))
    sizes, offsets, rotates = (np.array(column, dtype=np.int64) for column in zip(*flat, strict=True))
    return PeakFormula(
        roots=np.array(roots, dtype=np.int64), classes=np.array(classes, dtype=np.int64), counts=counts, at=at,
        size_table=body.coefficients[sizes], offset_table=body.coefficients[offsets], rotates=rotates, begins=begins,
        plain=len(flat) == len(members) and not body.coefficients[offsets].any() and bool((rotates == 1).all()),
    )  # fmt: skip


def _undominated(live: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], tuple[int, ...]]:
    """Distinct rows that no other row covers, with the first op at which each occurs, in program order."""
    rows = np.ascontiguousarray(live).view(f"V{live.shape[1] * live.itemsize}").ravel().tolist()
    found: dict[bytes, int] = {}
    for at, row in enumerate(rows):
        found.setdefault(row, at)
    first = np.array(list(found.values()), dtype=np.int64)
    distinct = live[first]
    covered: npt.NDArray[np.bool_] = np.all(distinct[:, None, :] <= distinct[None, :, :], axis=2)
    np.fill_diagonal(covered, False)
    keep = np.flatnonzero(~covered.any(axis=1))
    return np.ascontiguousarray(distinct[keep]), tuple(int(i) for i in first[keep])


# -- the formula as text -------------------------------------------------------------------------------------------


def formula_text(
    body: Body, formula: PeakFormula, off: Mapping[str, str], order: Sequence[tuple[str, str]], fixed: Mapping[str, int]
) -> list[tuple[str, int]]:
    """Return the forms as readable sums, without forms that another exceeds for all admissible dims.

    Parameters
    ----------
    off
        Row variables of the knobs that are off, mapped to the dim they run over.
    order
        Pairs (smaller, larger) of variables: chunk rows below their dim, masked below tokens.
    fixed
        Dims with a constant value.
    """
    forms = [_linear(body, formula, row, off, fixed) for row in formula.counts]
    kept: list[tuple[str, int]] = []
    for i, form in enumerate(forms):
        if any(_exceeds(other, form, order, tie=j < i) for j, other in enumerate(forms) if j != i):
            continue
        kept.append((_render(form), formula.at[i]))
    return kept


_Form = dict[tuple[tuple[str, int], ...], int]


def _linear(
    body: Body, formula: PeakFormula, counts: npt.NDArray[np.int64], off: Mapping[str, str], fixed: Mapping[str, int]
) -> _Form:
    """One form as {monomial: coefficient}, before rounding; an alias group has its first member's size."""
    total: _Form = {}
    for c, count in enumerate(counts):
        if not count:
            continue
        member = int(formula.begins[c])
        rotate = int(formula.rotates[member])
        for column, coefficient in enumerate(formula.size_table[member].tolist()):
            if not coefficient:
                continue
            value = coefficient * int(count) * rotate
            powers: dict[str, int] = {}
            for variable, power in zip(body.variables, body.exponents[column], strict=True):
                name = off.get(variable, variable)
                if power and name in fixed:
                    value *= fixed[name] ** int(power)
                elif power:
                    powers[name] = powers.get(name, 0) + int(power)
            key = tuple(sorted(powers.items()))
            total[key] = total.get(key, 0) + value
    return total


def _exceeds(larger: _Form, smaller: _Form, order: Sequence[tuple[str, str]], *, tie: bool) -> bool:
    """Whether `larger` >= `smaller` on the cone of admissible dims; on equality the earlier one wins.

    Linear forms are compared where all dims are 1 and along the cone's extreme rays (the 0/1 vectors that respect
    `order`); forms of higher degree coefficient by coefficient.
    """
    if larger == smaller:
        return tie
    keys = set(larger) | set(smaller)
    difference = {key: larger.get(key, 0) - smaller.get(key, 0) for key in keys}
    if sum(difference.values()) >= 0 and all(sum(power for _, power in key) <= 1 for key in keys):
        # Dims are 1 plus a point of the cone: at least as large where all are 1, and along every ray from there.
        linear = {key[0][0]: value for key, value in difference.items() if key}
        for ray in product((0, 1), repeat=len(linear)):
            point = dict(zip(linear, ray, strict=True))
            if any(point.get(low, 0) > point.get(high, 1) for low, high in order):
                continue
            if sum(value * point[name] for name, value in linear.items()) < 0:
                return False
        return True
    return all(value >= 0 for value in difference.values())


def _render(form: _Form) -> str:
    terms = sorted(form.items(), key=lambda item: (-sum(p for _, p in item[0]), -item[1], item[0]))
    shown = []
    for key, value in terms:
        factors = "*".join(name if power == 1 else f"{name}**{power}" for name, power in key)
        shown.append(f"{value}*{factors}" if factors else str(value))
    return " + ".join(shown) if shown else "0"
