"""Symbolic sizes as rows of a table of integer coefficients: the one place of the planner that computes with sympy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mosaic.errors import GraphError

__all__ = ["Polynomials", "factor_columns"]

_Terms: TypeAlias = Mapping[tuple[tuple[str, int], ...], Fraction]
"""A polynomial: monomials, as pairs (variable, power) in order of name, with their coefficients."""


@lru_cache(maxsize=4096)
def _terms(expr: Any) -> _Terms:
    """An expression as a polynomial; kept, as a model's other bodies have most of them too.

    Raises
    ------
    GraphError
        An expression that is none.
    """
    if isinstance(expr, int):
        return {(): Fraction(expr)}
    import sympy

    symbols = sorted(expr.free_symbols, key=str)
    try:
        terms = sympy.Poly(expr, *symbols or [sympy.Dummy()], domain="QQ").terms()
    except sympy.polys.polyerrors.BasePolynomialError:
        raise GraphError(f"'{expr}' is not a polynomial in {', '.join(map(str, symbols)) or 'the dims'}") from None
    names = [str(symbol) for symbol in symbols]
    return {
        tuple((name, power) for name, power in zip(names, powers, strict=False) if power): Fraction(int(c.p), int(c.q))
        for powers, c in terms
    }


class Polynomials:
    """Interns expressions as rows of a coefficient table."""

    def __init__(self, variables: Sequence[str]) -> None:
        self.variables = tuple(variables)
        self.rows: list[dict[tuple[int, ...], Fraction]] = []
        self._by_expr: dict[Any, int] = {}
        self._by_terms: dict[tuple[tuple[tuple[int, ...], Fraction], ...], int] = {}
        self._by_spec: dict[Any, tuple[list[int], int]] = {}

    def row(self, expr: Any) -> int:
        found = self._by_expr.get(expr)
        if found is None:
            terms = {self._powers(monomial): c for monomial, c in _terms(expr).items()}
            key = tuple(sorted(terms.items()))
            found = self._by_terms.setdefault(key, len(self.rows))
            if found == len(self.rows):
                self.rows.append(terms)
            self._by_expr[expr] = found
        return found

    def rows_of(self, spec: Any) -> tuple[list[int], int]:
        """Return the rows of an operand's dims, and of its bytes."""
        if spec not in self._by_spec:
            self._by_spec[spec] = [self.row(d) for d in spec.shape], self.row(spec.bytes)
        return self._by_spec[spec]

    def _powers(self, monomial: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
        powers = [0] * len(self.variables)
        for name, power in monomial:
            if name not in self.variables:
                raise GraphError(f"'{name}' is no dim and no knob's rows; those are {', '.join(self.variables)}")
            powers[self.variables.index(name)] = power
        return tuple(powers)

    def tables(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        powers = sorted({power for row in self.rows for power in row})
        column = {power: i for i, power in enumerate(powers)}
        coefficients = np.zeros((len(self.rows), len(powers)), dtype=np.int64)
        denominators = np.ones(len(self.rows), dtype=np.int64)
        for i, row in enumerate(self.rows):
            denominator = prod({c.denominator for c in row.values()})
            denominators[i] = denominator
            for power, c in row.items():
                coefficients[i, column[power]] = int(c * denominator)
        return np.array(powers, dtype=np.int64).reshape(len(powers), len(self.variables)), coefficients, denominators


def factor_columns(exponents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[degree, monomials]: the variables that each monomial multiplies; the number of variables stands for a 1."""
    constant = exponents.shape[1]
    lists = [[v for v, power in enumerate(row) for _ in range(power)] for row in exponents.tolist()]
    degree = max(1, *map(len, lists)) if lists else 1
    columns = [row + [constant] * (degree - len(row)) for row in lists]
    return np.ascontiguousarray(np.array(columns, dtype=np.int64).reshape(len(lists), degree).T)
