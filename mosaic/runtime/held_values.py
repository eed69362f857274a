"""The values that states and carries hold from one graph to the next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from mosaic.errors import UsageError

if TYPE_CHECKING:
    from mosaic.planner.plan_records import PlanRecords


class HeldValues(Mapping[str, int]):
    """Bytes that hold a value, by pool of a state or carry.

    A carry holds its value until a graph runs that does not declare it, or declares fewer bytes of it.
    """

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}

    def __getitem__(self, pool: str) -> int:
        return self._bytes[pool]

    def __iter__(self) -> Iterator[str]:
        return iter(self._bytes)

    def __len__(self) -> int:
        return len(self._bytes)

    def require(self, step: str, records: PlanRecords) -> None:
        """Make sure that the carries that a graph reads hold a value.

        Raises
        ------
        UsageError
            Naming a carry that does not.
        """
        for name, size in records.taken.items():
            if (left := self._bytes.get(f"carry/{name}", 0)) < size:
                raise UsageError(
                    f"the step '{step}' reads {size:,} bytes of the carry '{name}', of which earlier steps have left "
                    f"{left:,}: run the step that writes it first."
                )

    def begin(self, records: PlanRecords) -> None:
        """Note that a graph starts. If it fails, no carry holds a value, and a state has the rows that it had both
        before the graph and in it."""
        self._bytes = {pool: min(size, self._bytes.get(pool, 0)) for pool, size in records.held_states.items()}

    def done(self, records: PlanRecords) -> None:
        """Note that the graph has run."""
        self._bytes = dict(records.held)
