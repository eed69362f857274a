"""Steps of programs at the sizes of their dims; those of two graphs, of which the first computes how large the second has to be."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import ClassVar, TypeAlias

from mosaic.errors import BucketOverflow, GraphError

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramStep:
    """A step of a program and the values of its dims: what `StepSize` is for the steps of models.

    Parameters
    ----------
    name
        The graph that runs: a phase or joined step; of a bucketed step, its own name.
    sizes
        Values of the graph's dims; of a bucketed step, of those of its prefix.
    bucketed, suffix_sizes, buckets
        Of a bucketed step: what it is, the values of its suffix's dims but one, and the values that this one may take.
    dims_at
        Gives the values at another context length, in tokens.
    takes_all
        Whether a configuration is all for this graph; if not, it takes what it has.
    """

    name: str
    sizes: Mapping[str, int]
    bucketed: BucketedStep | None = None
    suffix_sizes: Mapping[str, int] = field(default_factory=dict)
    buckets: tuple[int, ...] = ()
    dims_at: Callable[[int], Mapping[str, int]] | None = None
    takes_all: bool = False

    follows: ClassVar[bool] = True
    """Whether it may read what another graph has left."""
    keeps_weights: ClassVar[bool] = True
    """Whether weights stay where they are for the step."""

    @property
    def kind(self) -> str:
        """The graph that is registered."""
        return self.name

    @property
    def key(self) -> Hashable:
        """Equal for steps that one plan serves."""
        return self.name, *sorted(self.sizes.items()), *sorted(self.suffix_sizes.items())

    def dims(self, architecture: object = None) -> Mapping[str, int]:
        """Return the values of the graph's dims."""
        return self.sizes

    def at(self, context: int) -> ProgramStep:
        """Return the step at another context length."""
        assert self.dims_at is not None
        return replace(self, sizes=self.dims_at(context))

    def graph(self, kept: int = 0) -> ProgramStep:
        """Return, of a bucketed step, the prefix, or the suffix in the bucket `kept`."""
        how = self.bucketed
        assert how is not None
        if not kept:
            return ProgramStep(name=how.prefix, sizes=self.sizes)
        return ProgramStep(name=how.suffix, sizes={**self.suffix_sizes, how.dim: kept})

    @property
    def graphs(self) -> tuple[ProgramStep, ...]:
        """The graphs that the step may run: itself; of a bucketed step the prefix, and the suffix in each bucket."""
        return (self.graph(), *map(self.graph, self.buckets)) if self.buckets else (self,)

    def beside(self, states: object) -> ProgramStep:
        """Return the step itself: its states have the rows that its dims say."""
        return self

    def rounded(self) -> ProgramStep:
        """Return the step itself: a program runs at the sizes that it is given."""
        return self
