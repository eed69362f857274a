"""The sizes of the steps that requests may share: admission checks them against the budget."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from mosaic.models.phase import shared_phase
from mosaic.models.step import StepSize, most_rows

if TYPE_CHECKING:
    from mosaic.models.phase import Phase
    from mosaic.models.state import State


class Tabled(Protocol):
    """The requests of a session that are rows of a table: a session's `Scheduler`."""

    def admits(self, rows: Sequence[Any], more: Mapping[State, int]) -> bool:
        """Return whether the smallest steps that serve any of them, and of `rows`, fit once `more` rows of states are taken."""

    def sizes(self, rows: Sequence[Any], more: Mapping[State, int]) -> Sequence[StepSize]:
        """Return the sizes of these steps."""

    def require(self, more: Mapping[State, int]) -> None:
        """Make sure that steps which were planned ahead serve still once `more` rows of states are taken."""

    def stands(self) -> bool:
        """Return whether the steps of all that was admitted, and of all requests that were foreseen, fit."""


class SharedSizes:
    """The largest steps that live requests may share, wherever each of them is.

    A request whose largest steps of a phase differ counts with the maximum of each: window, keys and rows. The join
    over the live requests is kept until one leaves, so admitting one more looks at that one alone.

    Parameters
    ----------
    all_sizes
        The `SharedSizes` of all sessions of an engine, in a weak set; this object adds itself.

    Attributes
    ----------
    table
        Those of the session's requests that are rows of a table; None if none can be.
    """

    def __init__(self, all_sizes: WeakSet[SharedSizes] | None = None) -> None:
        self._all = WeakSet[SharedSizes]() if all_sizes is None else all_sizes
        self._all.add(self)
        self._live: dict[Hashable, Sequence[StepSize]] = {}
        self._joined: dict[Phase, StepSize] | None = {}  # by phases that differ in heads alone
        self.table: Tabled | None = None

    @property
    def tables(self) -> list[Tabled]:
        """The tables of all sessions."""
        return [one.table for one in (self._all if len(self._all) > 1 else (self,)) if one.table is not None]

    def add(self, request: Hashable, largest: Sequence[StepSize]) -> None:
        """Add a live request, with its largest steps."""
        self._live[request] = largest
        if self._joined is not None:
            self._joined = _with(self._joined, [largest])

    def remove(self, request: Hashable) -> None:
        """Forget a request, if it is live."""
        if self._live.pop(request, None) is not None:
            self._joined = None

    def beside(self, more: Sequence[Sequence[StepSize]], *, rows: bool = False) -> list[StepSize]:
        """Return the sizes with the largest steps of other requests added, and the sizes of other sessions if those, or other
        newcomers (`rows`), take rows of states, which stand beside every session's steps; nothing changes."""
        found = self._joined_with(more)
        if len(self._all) > 1 and (rows or any(size.states for largest in more for size in largest)):
            for other in self._all:
                found += other._joined_with([]) if other is not self else []
        return found

    def _joined_with(self, more: Sequence[Sequence[StepSize]]) -> list[StepSize]:
        if not self._live and not more:
            return []
        if len(self._live) + len(more) == 1:
            return [size for largest in (*self._live.values(), *more) for size in largest]
        if self._joined is None:
            self._joined = _with({}, self._live.values())
        return list(_with(self._joined, more).values())


def _with(joined: Mapping[Phase, StepSize], more: Iterable[Sequence[StepSize]]) -> dict[Phase, StepSize]:
    """The steps that requests share, by phases that differ in heads alone, with the largest steps of others."""
    found = {phase: [size] for phase, size in joined.items()}
    for largest in more:
        own: dict[Phase, list[StepSize]] = {}
        for size in largest:
            own.setdefault(size.phase.any_head, []).append(size)
        for phase, sizes in own.items():
            found.setdefault(phase, []).append(_most(sizes))
    return {phase: _join(sizes) for phase, sizes in found.items()}


def _join(sizes: Sequence[StepSize]) -> StepSize:
    """The step that does what several do whose phases differ in heads alone."""
    if len(sizes) == 1:
        return sizes[0]
    return StepSize(
        phase=shared_phase(size.phase for size in sizes),
        windows=tuple([window for size in sizes for window in size.windows]),
        keys=tuple([seen for size in sizes for seen in size.keys]),
        owned=tuple([owned for size in sizes for owned in size.owned]),
        rows=sum([size.rows for size in sizes]),
        states=_sums(size.states for size in sizes),
    )


def _sums(states: Iterable[Mapping[State, int]]) -> dict[State, int]:
    found: dict[State, int] = {}
    for rows in states:
        for state, count in rows.items():
            found[state] = found.get(state, 0) + count
    return found


def _most(sizes: Sequence[StepSize]) -> StepSize:
    """One request's size that is at least as large as each of several sizes, whose phases differ in heads alone."""
    if len(sizes) == 1:
        return sizes[0]
    keys = [seen for size in sizes for seen in size.keys]
    return replace(
        sizes[0], phase=shared_phase(size.phase for size in sizes), windows=(max(size.windows[0] for size in sizes),),
        keys=(max(keys),) if keys else (), rows=max(size.rows for size in sizes), states=most_rows(sizes),
    )  # fmt: skip
