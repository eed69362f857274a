"""What a decoding algorithm asks of a model and gets: one request's part of a step, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from mosaic.models.phase import Phase

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture
    from mosaic.models.parts import Head
    from mosaic.models.state import State
    from mosaic.models.step import StepSize
    from mosaic.planner.plan import Plan
    from mosaic.runtime.sharing import SharedSizes

__all__ = ["StateRows", "StepRequest", "StepResult", "StepRunner"]


class StateRows(Protocol):
    """What decoding needs of rows of a state that one owner has, such as a sequence's keys: a model's are `OwnedRows`."""

    @property
    def length(self) -> int:
        """Positions that there are rows for."""

    def reserve(self, count: int, /) -> None:
        """Have rows for `count` positions; what is there stays where it is."""

    def close(self) -> None:
        """Give the rows back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """One request's part of a step. Legend: T tokens of the window, M rows to decide.

    Parameters
    ----------
    phase
        The kind of step; requests of one phase are packed into one.
    head
        Of a phase that covers the request's own: the head of that, whose token and scores its rows get.
    token_ids
        int64 [T], the window: tokens at the positions from `start` on.
    start
        Position of the first.
    sequence, key_len
        Of cached phases: whose keys and values, and how many of them are seen (at least `start` + T).
    final_length
        Of cached phases: positions that the sequence has in the end, the same in all of its steps. Frequencies that depend on a
        length (dynamic NTK) are those of this one; 0 where it stays within the positions that the model was trained on.
    rows
        int64 [M], the window's rows to decide, in ascending order.
    current
        int64 [M], the tokens that stand there.
    quota, threshold, edit_threshold
        What the phase's rule goes by.
    keys
        int64 [M], random keys of the rows, for phases that are `noisy`.
    temperature, top_p, top_k, score_temperature, guidance
        Of the sampling, for all of its rows. 0 is off, and so is top_p 1.
    unconditional
        int64 [T], the window with the prompt masked, for phases with guidance.
    lengths
        Tokens of each sequence, where `token_ids` are several whole ones; one if not given.
    logit_rows
        int64 [R], the tokens whose logits are returned, for phases that do.
    states
        Its rows of the other states that parts of the phase have.
    values
        By name, what parts of the phase need of a request beside these (`mosaic.models.inputs.Input`).
    """

    phase: Phase
    token_ids: Tensor
    start: int = 0
    sequence: StateRows | None = None
    key_len: int = 0
    final_length: int = 0
    rows: Tensor
    current: Tensor
    quota: int = 0
    threshold: float = 0.0
    edit_threshold: float = 0.0
    keys: Tensor | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    score_temperature: float = 0.0
    guidance: float = 0.0
    unconditional: Tensor | None = None
    lengths: tuple[int, ...] = ()
    logit_rows: Tensor | None = None
    states: Mapping[State, StateRows] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    head: Head | None = None

    def within(self, phase: Phase) -> StepRequest:
        """Return the same request for a step of a phase that covers its own."""
        same = phase is self.phase or phase == self.phase
        return self if same else replace(self, phase=phase, head=self.head or self.phase.head)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The outcome for one request, in tensors of the host that are the caller's.

    Parameters
    ----------
    token
        int64 [M], the token drawn for each row, or the most likely one.
    score
        float32 [M], by which rows were chosen.
    committed
        bool [M], the rows that the rule takes.
    chosen
        int64 [M], what stands there from now on: `token` where committed, else what stood there.
    plan
        The plan that was in force; of a step that is cut, its second graph's.
    seconds
        The step's wall-clock time, from its launch until its outcome was there.
    values
        By name, what other parts of the phase declare as results (`mosaic.models.parts.part.Part.results`).
    """

    token: Tensor
    score: Tensor
    committed: Tensor
    chosen: Tensor
    plan: Plan = field(repr=False)
    seconds: float
    values: Mapping[str, Tensor] = field(default_factory=dict)


class DividedStep(Protocol):
    """A step that is launched in parts: steps of others may run between two of them."""

    def go_on(self) -> list[StepResult] | None:
        """Launch the next part; with the last one, wait for the outcome and return it, from then on again."""

    def drop(self) -> None:
        """Leave out what was not launched; nothing of the step runs on."""


class StepRunner(Protocol):
    """What runs steps: a compiled model."""

    @property
    def architecture(self) -> Architecture:
        """Sizes and special tokens of the model."""

    @property
    def asynchronous(self) -> bool:
        """Whether a step that was launched runs beside the host."""

    def step(self, requests: Sequence[StepRequest]) -> list[StepResult]:
        """Run one step over requests of one phase, packed, and wait for its outcome: one result per request, in order."""

    def open_rows(self, state: State, /) -> StateRows:
        """Start an owner's rows of a state."""

    def sharing(self) -> SharedSizes:
        """Start to count what the live requests of one session come to share, beside the other sessions'."""

    def exclusive(self) -> AbstractContextManager[object]:
        """Keep other threads out until the block is left, so that what was checked stays true."""

    def check(self, sizes: Sequence[StepSize], *, more: Mapping[State, int] | None = None) -> Plan:
        """Plan steps of all of these sizes, beside the rows of states that are taken, and give the plan that takes the most
        memory.

        `more` are rows of each state that will be reserved by then, besides those that are.

        Raises
        ------
        DoesNotFit
            If one of them does not fit.
        """

    def admits(self, sizes: Sequence[StepSize], *, more: Mapping[State, int] | None = None) -> bool:
        """Return whether `check` finds a plan for every one of these sizes; it need not make them."""

    def pays(self, size: StepSize) -> bool:
        """Return whether a step that is cut takes less time, by its plans, than the same step whole, where it keeps few rows."""

    def place(self, steps: Mapping[str, StepSize], times: Mapping[str, int]) -> None:
        """Load the weights again where these steps, each run so many `times`, take the least predicted time in all, if it pays and
        nobody has rows."""
