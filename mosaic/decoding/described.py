"""A request that is described, and not live yet: what a session admits it by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from mosaic.decoding.algorithms import canvas_length, largest_steps, table_row
from mosaic.decoding.config import GenerationConfig
from mosaic.decoding.rows import TableRow, demand_of
from mosaic.models.parts import HELD_EXTENTS, KV
from mosaic.models.step import StepSize, most_rows
from mosaic.runtime.interrupts import interrupts_held

if TYPE_CHECKING:
    from mosaic.decoding.live import Submission
    from mosaic.models.architecture import Architecture
    from mosaic.models.state import State
    from mosaic.runtime.prefixes import Prefix
    from mosaic.runtime.request_table import RequestTable

__all__ = ["Described", "admitted", "describe"]


class Described(NamedTuple):
    """A request before it is live: the number that it draws by, token ids, resolved options, positions of its canvas, rows of
    states that it has, and its largest steps, or what a table has to know of it and what it shares."""

    submission: Submission
    number: int
    prompt: Tensor
    config: GenerationConfig
    length: int
    demand: dict[State, int]
    largest: list[StepSize]
    row: TableRow | None = None
    prefix: Prefix | None = None

    @property
    def taken(self) -> dict[State, int]:
        """The rows of states that it takes: all but those that it shares."""
        if self.prefix is None:
            return self.demand
        return self.demand | {KV: self.demand[KV] - self.prefix.length}

    def sharing(self, table: RequestTable | None, withdrawing: ExitStack) -> Described:
        """Return the same with what it shares, which the stack gives back."""
        if self.row is None or table is None or not self.row.shares or (prefixes := table.prefixes) is None:
            return self
        with interrupts_held():
            prefix = prefixes.open(self.prompt.cpu().long().numpy(), self.row.prefix, self.submission.priority)
            withdrawing.callback(prefix.drop)
        more = {HELD_EXTENTS: self.demand[HELD_EXTENTS] + prefix.extents}
        return self._replace(demand=self.demand | more, prefix=prefix)


def describe(
    submission: Submission, number: int, prompt: Tensor, config: GenerationConfig, arch: Architecture,
    table: RequestTable | None,
) -> Described:  # fmt: skip
    """Describe a request by resolved options."""
    tokens = prompt.numel()
    row = None if table is None else table_row(config, arch, tokens, number, table.streams_weights)
    if row is not None and table is not None:
        return Described(submission, number, prompt, config, row.length, demand_of(row, table.holes), [], row)
    largest, length = largest_steps(config, arch, tokens, number), canvas_length(config, arch, tokens)
    return Described(submission, number, prompt, config, length, most_rows(largest), largest)


def admitted(
    described: Sequence[Described], table: RequestTable | None, has_room: Callable[[Sequence[Described]], bool],
    withdrawing: ExitStack,
) -> Sequence[Described] | None:  # fmt: skip
    """Return the same with the prefixes that they share, if there is room for them; or without; or None. The stack gives back what
    they share."""
    found = [one.sharing(table, withdrawing) for one in described]
    if has_room(found):
        return found
    shared = [one.prefix for one in found if one.prefix is not None and one.prefix.length]
    for prefix in shared:
        prefix.drop()
    return found if shared and has_room(found) else None
