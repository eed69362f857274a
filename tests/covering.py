"""Few of many: a greedy cover, for grids of which a run takes only so many points that every pair of settings is in one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
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
