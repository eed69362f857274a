"""The base class of all parts of a phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from mosaic.models.inputs import Input

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.inputs import Supply
    from mosaic.models.state import State
    from mosaic.models.step_graph import Ending, StepGraph
    from mosaic.registrar.graph import Buffer

ResultPer: TypeAlias = Literal["token", "row", "sequence"]
"""What one value of an output belongs to. Values of one request are adjacent, in its own order."""


class Part:
    """One part of a phase: a frozen dataclass that declares its inputs and registers its ops.

    Phases with equal parts share a graph, so registration may depend on a part's fields alone.
    """

    __slots__ = ()

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return the inputs that the part needs."""
        return ()

    @property
    def states(self) -> Sequence[State]:
        """The states that the part's ops write or read: `g[NAME]` is the buffer."""
        return ()

    @property
    def reads_hidden(self) -> bool:
        """Whether the part reads the hidden states of all tokens after the last layer, as `step.hidden` in `finish` or
        as `end.hidden`. If no part of a phase does, the last layer computes less, and reading them raises."""
        return False

    def of_table(self, step: StepGraph, served: Mapping[str, Buffer]) -> Mapping[str, Supply]:
        """Return functions that register the part's inputs where a step serves requests of a table (`Tabled`), which gives it by
        name the table, the canvas, and buffers of who is served: row of the table, first position and keys seen of each window,
        bounds, and what each token, row to decide and extent is."""
        return {}

    def note(self, end: Ending, served: Mapping[str, Buffer]) -> None:
        """Register ops on the part's states in a step over requests of a table. Decisions are made, `end.g["committed"]`; the
        table says yet what the requests asked for."""

    def finish(self, step: StepGraph) -> None:
        """Register ops after the last layer, before rows are unembedded."""

    @property
    def results(self) -> Mapping[str, ResultPer]:
        """The outputs that go back to requests, by name, and what one value belongs to."""
        return {}

    def check(self, request: Any, arch: Architecture) -> None:
        """Raise a `UsageError` if a request lacks a value that the part needs."""

    @property
    def noisy(self) -> bool:
        """Whether the part takes random keys, one per row."""
        return False
