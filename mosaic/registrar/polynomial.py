"""Symbolic sizes: polynomials in dims, which are positive integers, with exact coefficients.

A dim is a polynomial by itself (`symbol`). `+`, `-`, `*`, `**` and division by a product are expanded, so that equal
sizes compare equal. A result that is a whole number is an `int`. `sympy.sympify` takes a polynomial as an expression.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import cache
from typing import Any, TypeAlias

__all__ = ["Dim", "Monomial", "Polynomial", "symbol", "terms"]

Monomial: TypeAlias = tuple[tuple[str, int], ...]
"""Pairs (dim, power) in order of name; the empty one is 1."""


class Polynomial:
    """A sum of monomials with coefficients, sorted.

    Examples
    --------
    >>> tokens, heads = symbol("tokens"), symbol("heads")
    >>> (tokens + 1) * (2 * heads), tokens * heads / heads, tokens - tokens
    (2*heads*tokens + 2*heads, tokens, 0)
    """

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: Iterable[tuple[Monomial, int | Fraction]]) -> None:
        self.terms = tuple(sorted(terms))
        self._hash = hash(self.terms)

    @property
    def names(self) -> frozenset[str]:
        """The dims in it."""
        return frozenset([name for monomial, _ in self.terms for name, _ in monomial])

    @property
    def name(self) -> str | None:
        """The dim that it is, or None."""
        return next(iter(self.names)) if len(self.names) == 1 and self == symbol(*self.names) else None

    @property
    def is_whole(self) -> bool:
        """Whether its value is an integer because all coefficients are."""
        return self.is_polynomial and all(isinstance(c, int) for _, c in self.terms)

    @property
    def is_polynomial(self) -> bool:
        """Whether nothing is divided by a dim."""
        return all(power > 0 for monomial, _ in self.terms for _, power in monomial)

    @property
    def is_nonnegative(self) -> bool:
        """Whether it is nonnegative for all dims: each is at least 1, and no coefficient in (dims - 1) is negative."""
        return self.is_polynomial and all(
            c >= 0 for _, c in terms(self.at({name: symbol(name) + 1 for name in self.names}))
        )

    def at(self, values: Mapping[str, Dim]) -> Dim:
        """Return it with some dims replaced."""
        total: Dim = 0
        for monomial, c in self.terms:
            product: Dim = _made([((), c)])
            for name, power in monomial:
                product *= values.get(name, symbol(name)) ** power
            total += product
        return total

    def __add__(self, other: object) -> Dim:
        found = _read(other)
        return NotImplemented if found is None else _made([*self.terms, *found])

    def __mul__(self, other: object) -> Dim:
        found = _read(other)
        if found is None:
            return NotImplemented
        return _made([(_product(m, n), c * d) for m, c in self.terms for n, d in found])

    def __truediv__(self, other: object) -> Dim:
        """Divide by a number or a product of dims.

        Raises
        ------
        TypeError
            If the divisor is a sum.
        """
        found = _read(other)
        if found is None or len(found) != 1:
            return NotImplemented
        ((monomial, c),) = found
        return self * Polynomial([(tuple([(name, -power) for name, power in monomial]), Fraction(1) / c)])

    def __floordiv__(self, other: object) -> Dim:
        """Divide without remainder.

        Raises
        ------
        TypeError
            If this is no multiple for all dims.
        """
        found = self / other
        if isinstance(found, Polynomial) and not found.is_whole:
            raise TypeError(f"{self} is no multiple of {other}")
        return found

    def __pow__(self, power: int) -> Dim:
        if len(self.terms) == 1:
            ((monomial, c),) = self.terms
            return _made([(tuple([(name, power * own) for name, own in monomial]), Fraction(c) ** power)])
        product: Dim = 1
        for _ in range(power):
            product *= self
        return product

    def __neg__(self) -> Dim:
        return self * -1

    def __sub__(self, other: Any) -> Dim:
        return self + -other

    def __rsub__(self, other: Any) -> Dim:
        return -self + other

    __radd__, __rmul__ = __add__, __mul__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Polynomial):
            return _read(other) == self.terms
        return self is other or (self._hash == other._hash and self.terms == other.terms)

    def __hash__(self) -> int:
        return self._hash

    def __float__(self) -> float:
        """Return a number's value.

        Raises
        ------
        TypeError
            If it depends on a dim.
        """
        if self.names:
            raise TypeError(f"{self} depends on {', '.join(sorted(self.names))}")
        return float(sum(c for _, c in self.terms))

    def __repr__(self) -> str:
        """The sum, higher degrees first."""
        ordered = sorted(self.terms, key=lambda term: (-sum(power for _, power in term[0]), term[0]))
        return " + ".join(_shown(*term) for term in ordered).replace("+ -", "- ") or "0"

    def _sympy_(self) -> Any:
        """The protocol of `sympy.sympify`."""
        import sympy

        dims = {name: sympy.Symbol(name, positive=True, integer=True) for name in self.names}
        return sympy.Add(*[sympy.Rational(c) * sympy.Mul(*[dims[n] ** p for n, p in m]) for m, c in self.terms])


Dim: TypeAlias = int | Any
"""A size: an integer, or a `Polynomial`. Operators' rules compute with both alike."""


@cache
def symbol(name: str) -> Polynomial:
    """Return the dim of a name."""
    return Polynomial([(((name, 1),), 1)])


def terms(size: Dim) -> tuple[tuple[Monomial, int | Fraction], ...]:
    """Return the monomials of a size with their coefficients; 0 has none."""
    return _read(size) or ()


def _read(size: object) -> tuple[tuple[Monomial, int | Fraction], ...] | None:
    """The terms of a size; None if it is none."""
    if isinstance(size, Polynomial):
        return size.terms
    return (((), size),) if isinstance(size, int | Fraction) else None


def _made(found: Iterable[tuple[Monomial, int | Fraction]]) -> Dim:
    """The sum of terms: an integer, if it is one."""
    total: dict[Monomial, int | Fraction] = {}
    for monomial, c in found:
        total[monomial] = total.get(monomial, 0) + c
    left = [(m, c if isinstance(c, int) or c.denominator > 1 else int(c)) for m, c in total.items() if c]
    if not left:
        return 0
    constant = left[0][1] if len(left) == 1 and not left[0][0] else None
    return constant if isinstance(constant, int) else Polynomial(left)


def _product(m: Monomial, n: Monomial) -> Monomial:
    """Two monomials multiplied."""
    if not m or not n:
        return m or n
    powers = dict(m)
    for name, power in n:
        powers[name] = powers.get(name, 0) + power
    return tuple(sorted([(name, power) for name, power in powers.items() if power]))


def _shown(monomial: Monomial, c: int | Fraction) -> str:
    factors = [name if power == 1 else f"{name}**{power}" for name, power in monomial]
    if abs(c) != 1 or not factors:
        return "*".join([str(c), *factors])
    return ("-" if c < 0 else "") + "*".join(factors)
