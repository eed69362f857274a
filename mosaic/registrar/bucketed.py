"""Steps of two graphs, of which the first computes how large the second has to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from mosaic.errors import BucketOverflow, GraphError

__all__ = ["BucketedStep", "Buckets"]

Buckets: TypeAlias = Sequence[int] | Callable[[Mapping[str, int]], Sequence[int]]
"""Sizes, ascending; or what gives them for the dims of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketedStep:
    """Two phases, one after the other: the first computes how large the second has to be.

    Parameters
    ----------
    prefix, suffix
        The phases. Carries that the prefix writes are the suffix's to read.
    count
        The output of the prefix that says how much of `dim` there is: one integer.
    dim
        The dim of the suffix that takes the smallest bucket of at least `count`.
    buckets
        The sizes that the suffix is planned for, ascending; or what gives them for the dims of a step.
    """

    prefix: str
    suffix: str
    count: str
    dim: str
    buckets: Buckets

    def sizes(self, dims: Mapping[str, int], most: int | None = None) -> tuple[int, ...]:
        """Return the sizes that the suffix is planned for in a step, ascending; none is more than `most`.

        Raises
        ------
        GraphError
            If the buckets are not ascending numbers from 1.
        """
        given = tuple(self.buckets(dims) if callable(self.buckets) else self.buckets)
        if not given or given[0] < 1 or any(a >= b for a, b in pairwise(given)):
            raise GraphError(f"buckets must be ascending numbers from 1, those of '{self.dim}' are {list(given)}")
        return given if most is None else tuple(dict.fromkeys(min(size, most) for size in given))

    def bucket(self, count: int, sizes: Sequence[int]) -> int:
        """Return the smallest of a step's sizes that holds a count.

        Raises
        ------
        BucketOverflow
            If none does.
        """
        for size in sizes:
            if count <= size:
                return size
        raise BucketOverflow(
            f"'{self.prefix}' computed {self.count} = {count:,}, the largest bucket of '{self.dim}' is {sizes[-1]:,}: "
            f"'{self.suffix}' has no plan for it. Declare a larger bucket.",
            count=count, buckets=tuple(sizes),
        )  # fmt: skip
