"""Symbolic sizes as rows of a table of integer coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from mosaic.errors import GraphError
from mosaic.registrar.polynomial import Dim, Monomial, terms

__all__ = ["Polynomials", "factor_columns"]


class Polynomials:
    """Interns expressions as rows of a coefficient table."""

    def __init__(self, variables: Sequence[str]) -> None:
        self.variables = tuple(variables)
        self.rows: list[dict[tuple[int, ...], int | Fraction]] = []
        self._by_size: dict[Dim, int] = {}
        self._by_spec: dict[Any, tuple[list[int], int]] = {}

    def row(self, size: Dim) -> int:
        """Return the row of a size.

        Raises
        ------
        GraphError
            If a size is divided by a dim, or has variables that the table lacks.
        """
        found = self._by_size.get(size)
        if found is None:
            if not isinstance(size, int) and not size.is_polynomial:
                raise GraphError(f"'{size}' is not a polynomial in {', '.join(sorted(size.names))}")
            found = self._by_size[size] = len(self.rows)
            self.rows.append({self._powers(monomial): c for monomial, c in terms(size)})
        return found

    def rows_of(self, spec: Any) -> tuple[list[int], int]:
        """Return the rows of an operand's dims, and of its bytes."""
        if spec not in self._by_spec:
            self._by_spec[spec] = [self.row(d) for d in spec.shape], self.row(spec.bytes)
        return self._by_spec[spec]

    def _powers(self, monomial: Monomial) -> tuple[int, ...]:
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
