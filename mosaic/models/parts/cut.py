"""Cuts: a step of two graphs, the second over fewer rows. Legend: T tokens, N H queries, B sequences.

The first graph, the prefix, ends inside a layer, after queries are computed and keys and values stored. There the part
chooses the rows to keep. The second, the suffix, has plans for several row counts and begins with that layer's
attention. Rows that are not kept have no keys in later layers, and nothing is decided in them.
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
"""The first graph's output with the number of kept rows."""
PLACE: Final = "place"
"""The second graph's output with the index of each row to decide in its results; -1: the row is not kept."""
KEPT: Final = "kept"
"""Its key in `StepResult.values`: bool [M], whether a row to decide is kept."""


KEPT_DIM: Final = "kept"
"""The dim of the second graph's rows."""
DECIDED_DIM: Final = "decided"
"""The dim of the rows among them that it decides."""


class KeptRows(NamedTuple):
    """Buffers in which a cut stores the kept rows.

    `rows` int64 [T] are row numbers of the step: first the kept ones, sequence by sequence, each once, in any order
    within a sequence; then padding, any valid row number. Sequence b has those from `bounds`[b], int32 [B + 1], to
    `bounds`[b + 1]; `bounds`[0] is 0. `total` int64 [1] is the number of kept rows.
    """

    rows: Buffer
    bounds: Buffer
    total: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut(Part):
    """Where a step is cut, and which rows are kept; a policy subclasses this.

    Parameters
    ----------
    layer
        The cut layer: ops before its attention are in the first graph. Not the last layer.
    sizes
        Row counts that the second graph is planned for, ascending; empty: `buckets`.
    """

    layer: int = 1
    sizes: tuple[int, ...] = ()

    @property
    def expects(self) -> int:
        """Requests expected to share a step: the step is cut only if that saves time for this number. 0: always."""
        return 0

    def buckets(self, tokens: int) -> Sequence[int]:
        """Return the row counts that the second graph is planned for in a step of `tokens` tokens, ascending.

        A count beyond the last is an error; by default the last is all tokens.
        """
        return self.sizes or sorted({max(tokens // share, 1) for share in (8, 4, 2, 1)})

    def declare(self, step: StepGraph) -> None:
        """Use, before the first layer, the inputs of `observe`: an input belongs to the scope of its first use."""

    def observe(self, step: StepGraph, layer: int, q: Buffer) -> None:
        """Register ops on a layer's queries [T, N H]; its keys and values are stored. Called up to the cut layer."""

    def select(self, step: StepGraph, into: KeptRows) -> None:
        """Register the ops that choose rows and write `into`."""
        raise NotImplementedError

    def supplied(self, step: StepGraph) -> Mapping[str, Supply]:
        """Return functions that register other parts' inputs that the step computes itself, such as `seen`."""
        return {}

    @property
    def results(self) -> Mapping[str, ResultPer]:
        """The place of each row to decide."""
        return {PLACE: "row"}
