"""The tokens of a step: their ids and positions, and the bounds of sequences. Every phase has this part.

Tokens come from the host, or from a table of requests on the device (`table.py`). Legend: T tokens, M rows to decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import lt
from typing import TYPE_CHECKING, Any, ClassVar, Final

from mosaic.errors import UsageError
from mosaic.models.inputs import Input
from mosaic.models.parts.part import Part

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.inputs import Supply
    from mosaic.models.step_graph import Ending, StepGraph
    from mosaic.registrar.graph import Buffer

__all__ = ["APART", "WINDOWS", "Apart", "Windows"]


@dataclass(frozen=True, slots=True)
class Windows(Part):
    """The windows of all sequences, one after another, as the host gives them.

    Attributes
    ----------
    padded
        Whether a step is planned for a rounded number of tokens; the padding at the end belongs to no sequence.
    alone
        Whether the host gives the inputs of this part alone: those of all others are computed.
    """

    padded: ClassVar[bool] = False
    alone: ClassVar[bool] = False

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return ids, positions, and bounds of sequences."""
        return (
            Input(name="token_ids", dtype="int64", per="token", value=lambda window: window.token_ids),
            Input(name="positions", dtype="int32", per="token", value=lambda window: range(window.start, window.end)),
            Input(name="cu_seqlens", dtype="int32", per="bound", value=lambda window: window.length),
        )

    def supplied(self, step: StepGraph) -> Mapping[str, Supply]:
        """Return the functions that register inputs that the step computes itself."""
        return {}

    def open_id(self, arch: Architecture) -> int:
        """Return the value of the input `current` in undecided rows."""
        return arch.mask_token_id

    def decided(self, end: Ending, chosen: Buffer, committed: Buffer) -> None:
        """Register ops on decisions: tokens int64 [M], and uint8 [M], whether each is taken."""


@dataclass(frozen=True, slots=True)
class Apart(Windows):
    """Windows of tokens that need not be adjacent: tokens in the gaps have keys already, and are not computed.

    `StepRequest.values["positions"]`, int32 [T], ascending, are their positions; the first is `start`. Rows to decide
    are indices into these tokens. Window lengths change in every step, so plans are for rounded numbers of tokens.
    """

    padded: ClassVar[bool] = True

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return ids, positions, and bounds of sequences."""
        given = Input(
            name="positions", dtype="int32", per="token", value=lambda window: window.request.values["positions"]
        )
        return tuple(given if entry.name == given.name else entry for entry in WINDOWS.inputs(arch))

    def check(self, request: Any, arch: Architecture) -> None:
        """Check that every token of a request has a position, that positions ascend, and that their keys are seen."""
        found = request.values.get("positions")
        places = [] if found is None else found.tolist()
        if len(places) != request.token_ids.numel():
            raise UsageError(
                f"the phase needs 'positions': one for each of the {request.token_ids.numel()} tokens of the window; give it in "
                "`values`."
            )
        if places[0] != request.start or not all(map(lt, places, places[1:])):
            raise UsageError(f"positions ascend from the window's start {request.start} on, got {places}.")
        if request.sequence is not None and places[-1] >= request.key_len:
            raise UsageError(
                f"a token at position {places[-1]} sees that many keys and its own, got {request.key_len}."
            )


WINDOWS: Final = Windows()
APART: Final = Apart()
