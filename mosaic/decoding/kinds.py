"""The kinds of requests in a session, as far as the size of a step depends on them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mosaic.kernels.shared.requests import turns
from mosaic.models.phase import Phase, shared_phase
from mosaic.models.policies.policy import with_parts
from mosaic.registrar.request_table import Column

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Kind", "Kinds", "first_tokens", "needs_of", "phase_of", "usual_tokens"]


class Kind(NamedTuple):
    """What the size of a step has to know of a request: its group, the kind of step, tokens of its largest one, the tokens that its
    steps are multiples of, and the rows that it decides at most."""

    group: int
    phase: Phase
    tokens: int
    block: int
    rows: int


class Kinds(dict[int, dict[Kind, int]]):
    """How many live requests there are of each kind, by group."""

    def changed(self, changes: Iterable[tuple[Kind, int]]) -> dict[int, dict[Kind, int]]:
        """Return the same for the groups of these kinds, once so many more of each are live, or fewer."""
        found: dict[int, dict[Kind, int]] = {}
        for kind, change in changes:
            if (mine := found.get(kind.group)) is None:
                mine = found[kind.group] = {**self.get(kind.group, {})}
            mine[kind] = mine.get(kind, 0) + change
            if not mine[kind]:
                del mine[kind]
        return found

    def change(self, changes: Iterable[tuple[Kind, int]]) -> None:
        """Count so many more of each of these kinds, or fewer."""
        self.update(self.changed(changes))
        for group in [group for group, mine in self.items() if not mine]:
            del self[group]

    def of(self, groups: Iterable[int]) -> list[Kind]:
        """Return the kinds of some groups."""
        return [kind for group in groups for kind in self.get(group, ())]


@lru_cache(maxsize=1024)
def needs_of(kinds: tuple[Kind, ...]) -> tuple[int, int, int]:
    """Tokens of the largest step that cannot be cut, the smallest block, and the rows that one request decides at most."""
    blocks, rows = [kind.block for kind in kinds], [kind.rows for kind in kinds]
    return max([kind.tokens for kind in kinds]), min(blocks), max(rows)


def usual_tokens(kind: Kind) -> int:
    """Tokens that most steps compute for a request at most: others are few, and of whole canvases one at a time."""
    return min(kind.tokens, 2 * kind.rows)


def first_tokens(
    columns: NDArray[np.int64], length: NDArray[np.int64], decides: NDArray[np.bool_], fills: NDArray[np.bool_]
) -> int:
    """Tokens without which a step serves neither the first of those who decide nor the first prompt, which can be cut."""
    needs = np.where(fills, np.minimum(columns[:, Column.SPAN], length), length)
    order = turns(columns).argsort(kind="stable")
    return max([int(np.add.reduce(needs[order[asks[order]][:1]])) for asks in (decides, fills)])


@lru_cache(maxsize=1024)
def phase_of(kinds: tuple[Kind, ...], *, marked: bool) -> Phase:
    """The kind of step that serves all of these."""
    phase = shared_phase([kind.phase for kind in kinds])
    return with_parts(phase, cache=phase.cache.covering) if marked else phase
