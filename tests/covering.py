"""A greedy pairwise cover: grids run only as many points as put every pair of settings in one."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet


def covering(sets: Sequence[AbstractSet[Hashable]], candidates: Callable[[], Sequence[int]]) -> list[int]:
    """Choose places in a list of sets until those chosen hold all values.

    Parameters
    ----------
    candidates
        Asked before every choice for the places to choose among; the first that adds most is taken, or the first place
        that adds anything, where none of them does.
    """
    missing: set[Hashable] = set().union(*sets)
    chosen = []
    while missing:
        best = max(candidates(), key=lambda place: len(sets[place] & missing))
        if not sets[best] & missing:
            best = next(place for place, values in enumerate(sets) if values & missing)
        chosen.append(best)
        missing -= sets[best]
    return chosen


def some_of(options: Mapping[str, Sequence[str]], count: int, seed: str) -> list[dict[str, str]]:
    """Combinations of choices drawn at random, until there are `count` and every option is in one."""
    source, found = random.Random(seed), list[dict[str, str]]()
    pairs = {(name, option) for name, some in options.items() for option in some}
    while len(found) < count or pairs - {pair for one in found for pair in one.items()}:
        found.append({name: source.choice(some) for name, some in options.items()})
    return found
