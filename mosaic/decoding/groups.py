"""The groups of a table's requests: which of them one step serves together, and whose turn it is.

Requests of one group have policies alike. A step may serve several groups: with sparse attention, requests that have none attend
to all keys; with eviction, requests that evict nothing keep all rows. Two ways of sparse attention, or of eviction, take turns.
Prompts of all groups are written by steps of group 0, which has no policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from mosaic.decoding.rows import RULE
from mosaic.errors import UsageError
from mosaic.models.parts import KEPT, CachePolicy, CommitRule, Cut

if TYPE_CHECKING:
    from mosaic.decoding.rows import TableRow
    from mosaic.kernels.shared.requests import Wanted

__all__ = ["Group", "Groups"]

MOST: Final = 62
"""Groups of a session: a step has a bit for each."""
_PROMPTS: Final = -1
"""Stands for the prompts of all groups, which have a turn of their own."""


class Group(NamedTuple):
    """What requests have alike: the cache policy of their marked steps, the cut, and the rule."""

    cache: CachePolicy
    cut: Cut | None
    commit: CommitRule

    def join(self, other: Group) -> Group | None:
        """Return the group whose steps serve both, or None."""
        caches, cuts = {self.cache, other.cache} - {KEPT}, {self.cut, other.cut} - {None}
        if self.commit != other.commit or len(caches) > 1 or len(cuts) > 1:
            return None
        cache, cut = next(iter(caches), KEPT), next(iter(cuts), None)
        mixed = self.cache != other.cache
        if (mixed and not cache.serves_exact) or (cut is not None and not any(way.cuts for way in cache.ways())):
            return None
        return Group(cache, cut, self.commit)


class Groups:
    """The groups of a session, by number."""

    def __init__(self) -> None:
        self._groups = [Group(KEPT, None, RULE.covering)]
        self._numbers = dict[tuple[CachePolicy, Cut | None, CommitRule], int]()  # by what requests asked for
        self._turns = dict[int, int]()  # the launch in which each had its last one
        self._launches = 0

    def __len__(self) -> int:
        return len(self._groups)

    def number(self, row: TableRow) -> int:
        """Return the number of a request's group.

        Raises
        ------
        UsageError
            If there are too many.
        """
        asked = row.cache, row.cut, row.commit
        if (found := self._numbers.get(asked)) is None:
            group = Group(row.cache.covering, row.cut, row.commit.covering)
            if group not in self._groups:
                if len(self) == MOST:
                    raise UsageError(f"a session serves {MOST} combinations of policies: open another one for more.")
                self._groups.append(group)
            found = self._numbers[asked] = self._groups.index(group)
        return found

    def mixes(self, numbers: Iterable[int]) -> bool:
        """Return whether some of these groups select keys and others attend to all."""
        return len({self._groups[number].cache for number in numbers}) > 1

    def choices(self, asked: Wanted) -> list[tuple[int, ...]]:
        """Return the groups of the next step: all that share it with the one that has waited longest, then that one alone."""
        asking = {*asked.group[asked.running & ~asked.fills].tolist()}
        if np.logical_or.reduce(asked.running & asked.fills):
            asking.add(_PROMPTS)
        if not asking:
            return []
        first, *others = sorted(asking, key=lambda number: self._turns.get(number, 0))
        if first == _PROMPTS or asking <= {0, _PROMPTS}:
            return [(0,)]
        joined = self.together((first, *(number for number in others if number != _PROMPTS)))
        return [joined, (first,)] if len(joined) > 1 else [joined]

    def together(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Return the first of some groups and those of the others that a step can serve beside it, each with those before."""
        found, joined = [numbers[0]], self._groups[numbers[0]]
        for number in numbers[1:]:
            if (both := joined.join(self._groups[number])) is not None:
                found.append(number)
                joined = both
        return tuple(found)

    def shared(self, numbers: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Give each of these groups alone, and all kinds of steps that several of them share, each for as many as it serves."""
        yield from ((number,) for number in numbers)
        pairs = [pair for pair in combinations(numbers, 2) if len(self.together(pair)) > 1]
        yield from dict.fromkeys([self._widened(pair, numbers) for pair in pairs])

    def _widened(self, pair: tuple[int, int], numbers: Sequence[int]) -> tuple[int, ...]:
        """These two groups, and those that a step of theirs serves as it is."""
        joined = self._groups[pair[0]].join(self._groups[pair[1]])
        assert joined is not None, "they share steps"
        return tuple([
            number for number in numbers
            if number in pair or (joined.join(self._groups[number]) == joined and self.mixes(pair) == self.mixes((*pair, number)))
        ])  # fmt: skip

    def served(self, numbers: tuple[int, ...]) -> None:
        """Note that a step was launched for some groups; one of group 0 alone is the prompts' turn, too."""
        self._launches += 1
        whose = (0, _PROMPTS) if numbers == (0,) else numbers
        self._turns.update(dict.fromkeys(whose, self._launches))


def bits(numbers: Iterable[int]) -> int:
    """Return a number with a bit for each of these.

    >>> bits([0, 2])
    5
    """
    return sum([1 << number for number in numbers])
