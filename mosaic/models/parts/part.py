"""What all parts of a phase have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from mosaic.models.inputs import Input

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.state import State
    from mosaic.models.step_graph import StepGraph

ResultPer: TypeAlias = Literal["token", "row", "sequence", "step"]
"""What one value of an output belongs to. Values of one request are next to each other, in its own order; what belongs to the
step goes to all of its requests."""


class Part:
    """One part of a phase: a frozen dataclass that declares its inputs and registers its ops.

    Two phases whose parts are equal share a graph, so a part's fields are all that its registration may depend on.
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
        """Whether the part reads the hidden states of all tokens after the last layer: `step.hidden` in `finish`, or
        `end.hidden`. Where no part of a phase does, the last layer computes less, and these are refused."""
        return False

    def finish(self, step: StepGraph) -> None:
        """Register what the part does after the last layer, before rows are unembedded."""

    @property
    def results(self) -> Mapping[str, ResultPer]:
        """The graph's outputs that go back to requests, by name, and what one value belongs to."""
        return {}

    def check(self, request: Any, arch: Architecture) -> None:
        """Raise a `UsageError` where a request lacks what the part needs."""

    @property
    def noisy(self) -> bool:
        """Whether the part takes random keys, one per row."""
        return False
