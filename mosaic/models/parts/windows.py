"""The tokens of a step: their ids and positions, and the bounds of sequences. Every phase has this part.

Tokens come from the host, or from a canvas on the device that steps read and write. With a canvas a step needs no
outcome of the previous one, so it is launched before the host reads that. Legend: T tokens, M rows to decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import lt
from typing import TYPE_CHECKING, Any, ClassVar, Final

from mosaic.errors import UsageError
from mosaic.models.inputs import Input
from mosaic.models.parts.part import Part
from mosaic.models.state import State
from mosaic.registrar.operators.read_canvas import OPEN

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.inputs import Supply, Window
    from mosaic.models.step_graph import Ending, StepGraph
    from mosaic.registrar.graph import Buffer

__all__ = ["APART", "CANVAS", "ENTERED", "OPEN", "STAYING", "WINDOWS", "Apart", "OnDevice", "Windows"]

CANVAS: Final = State(name="canvas", dtype="int64", together=True)
"""A token for each position of a request, `OPEN` where nothing is decided."""


@dataclass(frozen=True, slots=True)
class Windows(Part):
    """The windows of all sequences, one after another, as the host gives them.

    Attributes
    ----------
    computes
        Inputs of other parts that the step computes itself.
    padded
        Whether a step is planned for a rounded number of tokens; the padding at the end belongs to no sequence.
    alone
        Whether the host gives the inputs of this part alone: those of all others are computed.
    """

    computes: ClassVar[frozenset[str]] = frozenset()
    padded: ClassVar[bool] = False
    alone: ClassVar[bool] = False

    @property
    def covering(self) -> Windows:
        """Windows whose steps also serve requests of this kind: if both wait, they share such a step."""
        return self

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return ids, positions, and bounds of sequences."""
        return (
            Input(name="token_ids", dtype="int64", per="token", value=lambda window: window.token_ids),
            Input(name="positions", dtype="int32", per="token", value=lambda window: range(window.start, window.end)),
            Input(name="cu_seqlens", dtype="int32", per="bound", value=lambda window: window.length),
        )

    def begin(self, step: StepGraph) -> None:
        """Register ops before the embedding."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDevice(Windows):
    """Windows of canvases on the device.

    Parameters
    ----------
    enters
        Host tokens are written into the canvas first: `StepRequest.values["entered"]`, int64 [T]; `OPEN` leaves the
        token as it is.
    """

    computes: ClassVar[frozenset[str]] = frozenset({"token_ids", "current"})
    enters: bool

    @property
    def covering(self) -> OnDevice:
        """The entered tokens; `OPEN` for every token of a request without any."""
        return ENTERED

    def inputs(self, arch: Architecture) -> Sequence[Input]:
        """Return positions, bounds, and the canvas rows of tokens and decisions."""
        entered = (
            Input(name="entered", dtype="int64", per="token", value=lambda window: window.request.values["entered"]),
            Input(name="entered_rows", dtype="int64", per="token", value=_entered_rows),
        )
        return (
            *[entry for entry in WINDOWS.inputs(arch) if entry.name != "token_ids"],
            Input(name="token_rows", dtype="int64", per="token", value=_token_rows),
            Input(name="decided_rows", dtype="int64", per="row", value=_decided_rows),
            *(entered if self.enters else ()),
        )  # fmt: skip

    def check(self, request: Any, arch: Architecture) -> None:
        """Check that a request has a canvas, and its entered tokens."""
        if CANVAS not in request.states:
            raise UsageError(
                f"a request with tokens on the device needs rows of the state '{CANVAS.name}': give them in `states`."
            )
        tokens = request.token_ids.numel()
        if self.enters and len(request.values.get("entered", ())) != tokens:
            raise UsageError(
                f"the phase needs 'entered': a token for each of the {tokens} tokens of the window; give it in `values`."
            )

    @property
    def states(self) -> Sequence[State]:
        """The canvas."""
        return (CANVAS,)

    def begin(self, step: StepGraph) -> None:
        """Write the entered tokens."""
        if self.enters:
            inputs = step.inputs
            step.g.add_op("write_canvas", inputs["entered"], inputs["entered_rows"], step.state(CANVAS), name="enter")

    def supplied(self, step: StepGraph) -> Mapping[str, Supply]:
        """Return the ids of all tokens, and the current values of the rows to decide."""

        def read(rows: str, name: str, open_id: int) -> Buffer:
            tokens: Buffer = step.g.add_op(
                "read_canvas", step.state(CANVAS), step.inputs[rows], name=name, open_id=open_id
            )
            return tokens

        return {
            "token_ids": lambda: read("token_rows", "tokens", step.arch.mask_token_id),
            "current": lambda: read("decided_rows", "current", OPEN),
        }

    def open_id(self, arch: Architecture) -> int:
        """Return `OPEN`: a model may decide for the mask token, and that position is then decided."""
        return OPEN

    def decided(self, end: Ending, chosen: Buffer, committed: Buffer) -> None:
        """Write the decisions."""
        canvas = CANVAS.register(end.g, end.arch)
        end.g.add_op("write_canvas", chosen, end.inputs["decided_rows"], canvas, committed, name="decide")


def _token_rows(window: Window) -> tuple[range, ...]:
    owned = window.request.states[CANVAS]
    return tuple(range(first, first + count) for first, count in owned.runs(window.start, window.end))


def _entered_rows(window: Window) -> Any:
    """The canvas rows of entered tokens, if the phase has any."""
    rows = window.request.states[CANVAS].slots(window.start, window.end)
    return rows.where(window.request.values["entered"] >= OPEN, -1)


def _decided_rows(request: Any) -> Any:
    count = max(request.rows.tolist(), default=-1) + 1  # in shifted models up to one beyond the window
    return request.states[CANVAS].slots(request.start, request.start + count)[request.rows]


WINDOWS: Final = Windows()
APART: Final = Apart()
ENTERED: Final = OnDevice(enters=True)
STAYING: Final = OnDevice(enters=False)
