"""A request that is described, and not live yet: what a session admits it by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mosaic.decoding.algorithms import canvas_length, largest_steps, table_row
from mosaic.decoding.config import GenerationConfig
from mosaic.decoding.rows import TableRow, demand_of
from mosaic.models.parts import KV
from mosaic.models.step import StepSize, most_rows
from mosaic.runtime.room import SEEN

if TYPE_CHECKING:
    from contextlib import ExitStack

    from mosaic.decoding.live import Submission
    from mosaic.models.architecture import Architecture
    from mosaic.models.state import State
    from mosaic.runtime.prefixes import Found, Prefix
    from mosaic.runtime.request_table import RequestTable

__all__ = ["Described", "admitted", "describe", "rows_of"]


class Described(NamedTuple):
    """A request before it is live: the number that it draws by, token ids, int64 [P], resolved options, positions of its canvas,
    rows of states that it has, and its largest steps, or what a table has to know of it and what it shares, if it can."""

    submission: Submission
    number: int
    prompt: NDArray[np.int64]
    config: GenerationConfig
    length: int
    demand: dict[State, int]
    largest: list[StepSize]
    row: TableRow | None = None
    shared: Found | None = None

    def alone(self) -> Described:
        """Return the same with nothing that it shares."""
        return self._replace(shared=[]) if self.shared else self

    def open(self, table: RequestTable | None, withdrawing: ExitStack) -> Prefix | None:
        """Take what it shares, until the stack gives it back."""
        if self.shared is None or self.row is None or table is None or (prefixes := table.prefixes) is None:
            return None
        found = prefixes.open(self.prompt, self.row.prefix, self.submission.priority)
        withdrawing.callback(found.drop)
        if not self.shared:
            found.drop()  # there was no room for it
        return found


def describe(
    submission: Submission, number: int, prompt: NDArray[np.int64], config: GenerationConfig, arch: Architecture,
    table: RequestTable | None,
) -> Described:  # fmt: skip
    """Describe a request by resolved options; nothing changes."""
    tokens = len(prompt)
    row = None if table is None else table_row(config, arch, tokens, number, table.streams_weights)
    if row is None or table is None:
        largest, length = largest_steps(config, arch, tokens, number), canvas_length(config, arch, tokens)
        return Described(submission, number, prompt, config, length, most_rows(largest), largest)
    shared = None
    if row.shares and (prefixes := table.prefixes) is not None:
        shared = prefixes.match(prompt, row.prefix, submission.priority)
    demand = demand_of(row, table.holes + len(shared or ()))
    return Described(submission, number, prompt, config, row.length, demand, [], row, shared)


def rows_of(more: Sequence[Described], table: RequestTable | None) -> dict[State, int]:
    """Return the rows of states that requests are given together: all but those that they share; and the keys that they see."""
    found = {**more[0].demand} if more else {}
    for one in more[1:]:
        for state, count in one.demand.items():
            found[state] = found.get(state, 0) + count
    shared = [one.shared for one in more if one.shared]
    if shared and table is not None and (prefixes := table.prefixes) is not None:
        found[SEEN], found[KV] = found[KV], prefixes.fresh(found[KV], shared)
    return found


def admitted(
    described: Sequence[Described], has_room: Callable[[Sequence[Described]], bool]
) -> Sequence[Described] | None:
    """Return the same, if there is room for them and what they share; or without that; or None."""
    if has_room(described):
        return described
    alone = [one.alone() for one in described]
    return alone if any(one.shared for one in described) and has_room(alone) else None
