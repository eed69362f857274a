"""Cuts: a step of two graphs, of which the second computes fewer rows. Legend: T tokens, N H queries, B sequences.

The first graph, the prefix, ends inside a layer: queries of its tokens are computed, keys and values stored. There the part
chooses which rows are kept. The second, the suffix, has plans for several numbers of rows; it begins with that layer's
attention. Rows that are not kept have no keys in later layers, and nothing is decided there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from mosaic.models.parts.part import Part, ResultPer

if TYPE_CHECKING:
    from mosaic.models.inputs import Supply
    from mosaic.models.step_graph import StepGraph
    from mosaic.registrar.graph import Buffer

COUNT: Final = "count"
"""The output of both graphs that says how many rows are kept; the second's arrives with its results."""
PLACE: Final = "place"
"""The second graph's output that says which of its results a row to decide has; -1: the row is not kept."""
KEPT: Final = "kept"
"""What comes of it in `StepResult.values`: bool [M], whether a row to decide is kept."""


KEPT_DIM: Final = "kept"
"""The dim of the second graph: rows that it computes."""
DECIDED_DIM: Final = "decided"
"""Of these, the rows that it decides."""


class KeptRows(NamedTuple):
    """Where a cut says which rows are kept.

    `rows` int64 [T] are numbers of the step's tokens: first the kept ones, sequence by sequence, each once, in any order
    within a sequence; what follows is padding, and a token's number too. Sequence b has those from `bounds`[b], int32 [B + 1],
    to `bounds`[b + 1]; `bounds`[0] is 0. `total` int64 [1] is how many there are.
    """

    rows: Buffer
    bounds: Buffer
    total: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut(Part):
    """Where a step is cut, and what is kept of it; a policy subclasses this.

    Parameters
    ----------
    layer
        The layer that is cut: all that comes before its attention is in the first graph. Not the last one.
    guesses
        Whether the second graph is launched at the size that steps before have needed, and the count is read with its results:
        where there are more rows, it runs again. Otherwise the host waits for the count between the graphs. The second graph
        changes nothing that outlives it where it has no room: all of `cu_seqlens` and `cu_rows` is 0 then, and ops that write to
        a state go by these. Those of the first graph run once.
    sizes
        Numbers of rows that the second graph is planned for, ascending; empty: as `buckets` says.
    """

    layer: int = 1
    guesses: bool = False
    sizes: tuple[int, ...] = ()

    @property
    def expects(self) -> int:
        """How many requests are expected to share a step: it is not cut if that saves them no time. 0: it always is."""
        return 0

    def buckets(self, tokens: int) -> Sequence[int]:
        """Return the numbers of rows that the second graph is planned for in a step of `tokens` tokens, ascending.

        A count beyond the last is an error; the last is all tokens, unless overridden.
        """
        return self.sizes or sorted({max(tokens // share, 1) for share in (8, 4, 2, 1)})

    def declare(self, step: StepGraph) -> None:
        """Ask, before the first layer, for inputs that `observe` reads: in a layer they would be the layer's."""

    def observe(self, step: StepGraph, layer: int, q: Buffer) -> None:
        """Register what the part computes of a layer's queries [T, N H]; its keys and values are stored. Called for each layer
        up to the one that is cut."""

    def select(self, step: StepGraph, into: KeptRows) -> None:
        """Register the ops that choose, and that write `into`."""
        raise NotImplementedError

    def supplied(self, step: StepGraph) -> Mapping[str, Supply]:
        """Return what registers inputs of other parts that the step computes itself, such as `seen`, in either graph."""
        return {}

    @property
    def results(self) -> Mapping[str, ResultPer]:
        """How many rows are kept, and what becomes of each row to decide."""
        return {COUNT: "step", PLACE: "row"}
