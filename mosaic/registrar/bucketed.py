"""Steps of programs at given sizes of their dims; in bucketed steps the first graph computes the second's size."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import ClassVar, TypeAlias

from mosaic.errors import BucketOverflow, GraphError

Buckets: TypeAlias = Sequence[int] | Callable[[Mapping[str, int]], Sequence[int]]
"""Sizes, ascending; or a function that computes them from the dims of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketedStep:
    """Two phases, one after the other: the first computes the size of the second.

    Parameters
    ----------
    prefix, suffix
        The phases. Carries that the prefix writes are the suffix's to read.
    count
        The output of the prefix with the size of `dim`: one integer.
    dim
        The dim of the suffix; it is set to the smallest bucket of at least `count`.
    buckets
        The sizes that the suffix is planned for, ascending; or a function that computes them from the dims of a step.
    """

    prefix: str
    suffix: str
    count: str
    dim: str
    buckets: Buckets

    def sizes(self, dims: Mapping[str, int], most: int | None = None) -> tuple[int, ...]:
        """Return the sizes that the suffix is planned for in a step, ascending and at most `most`.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramStep:
    """A step of a program and the values of its dims: the counterpart of `StepSize` for programs.

    Parameters
    ----------
    name
        The graph that runs: a phase or joined step; for a bucketed step, its own name.
    sizes
        Values of the graph's dims; for a bucketed step, those of its prefix.
    bucketed, suffix_sizes, buckets
        For a bucketed step: its record, the values of its suffix's other dims, and the possible values of `dim`.
    dims_at
        Computes the values at another context length, in tokens.
    takes_all
        Whether this graph must have every setting of a configuration; otherwise it takes the settings that it has.
    """

    name: str
    sizes: Mapping[str, int]
    bucketed: BucketedStep | None = None
    suffix_sizes: Mapping[str, int] = field(default_factory=dict)
    buckets: tuple[int, ...] = ()
    dims_at: Callable[[int], Mapping[str, int]] | None = None
    takes_all: bool = False

    follows: ClassVar[bool] = True
    """Whether it may read carries of another graph."""
    keeps_weights: ClassVar[bool] = True
    """Whether weights must stay where they are for the step."""

    @property
    def kind(self) -> str:
        """The graph that is registered."""
        return self.name

    @property
    def key(self) -> Hashable:
        """A key that is equal for steps that one plan serves."""
        return self.name, *sorted(self.sizes.items()), *sorted(self.suffix_sizes.items())

    def dims(self, architecture: object = None) -> Mapping[str, int]:
        """Return the values of the graph's dims."""
        return self.sizes

    def at(self, context: int) -> ProgramStep:
        """Return the step at another context length."""
        assert self.dims_at is not None
        return replace(self, sizes=self.dims_at(context))

    def graph(self, kept: int = 0) -> ProgramStep:
        """Return a bucketed step's prefix, or its suffix in the bucket `kept`."""
        how = self.bucketed
        assert how is not None
        if not kept:
            return ProgramStep(name=how.prefix, sizes=self.sizes)
        return ProgramStep(name=how.suffix, sizes={**self.suffix_sizes, how.dim: kept})

    @property
    def graphs(self) -> tuple[ProgramStep, ...]:
        """The graphs that the step may run: itself; for a bucketed step the prefix, and the suffix in each bucket."""
        return (self.graph(), *map(self.graph, self.buckets)) if self.buckets else (self,)

    def beside(self, states: object) -> ProgramStep:
        """Return the step itself: its dims give the rows of its states."""
        return self

    def rounded(self) -> ProgramStep:
        """Return the step itself: a program runs at the sizes that it is given."""
        return self
