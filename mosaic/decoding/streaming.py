"""What a generation shows while it runs: streamers in the manner of transformers, and a `Step` for every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, overload, runtime_checkable

import numpy as np
from torch import Tensor

from mosaic.errors import UsageError

if TYPE_CHECKING:
    from mosaic.planner.plan import Plan

__all__ = ["DraftStreamer", "OnStep", "Step", "Steps", "Streamer", "of_each"]


class Streamer(Protocol):
    """Receives final tokens. Any streamer of transformers is one."""

    def put(self, value: Tensor) -> None:
        """Take the prompt, int64 [P], first of all; then committed tokens, int64 [n], in order."""

    def end(self) -> None:
        """Take note of the end."""


@runtime_checkable
class DraftStreamer(Protocol):
    """A streamer that also shows the answer while it fills in."""

    def put_draft(self, token_ids: Tensor, confidence: Tensor) -> None:
        """Take the answer as it stands after a step.

        Parameters
        ----------
        token_ids
            int64 [G], the mask where nothing is decided.
        confidence
            float32 [G], what the tokens were committed by; 0 where masked.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a step did for one request; all tensors are the receiver's.

    Parameters
    ----------
    request
        The place of the request in the batch.
    step
        Steps that were run for it, with this one, prefills and commits.
    block
        The block being decoded, from 0.
    phase
        `full_step`, `denoise` or `commit`.
    masked
        Positions of the answer that are still masked.
    positions, token_ids, confidence
        int64 [n], int64 [n], float32 [n]: what was committed. Positions count from the prompt's first token. The confidence
        is the score that rows were chosen by: a negative entropy if that is the score, with noise under `alg_temp`.
    plan
        The plan that was in force.
    peak_bytes
        Bytes of the device that the plan takes in all.
    seconds
        Wall-clock time of the step from its launch to its outcome. A table's next step is launched before that: their times
        overlap.
    """

    request: int
    step: int
    block: int
    phase: str
    masked: int
    positions: Tensor
    token_ids: Tensor
    confidence: Tensor
    plan: Plan = field(repr=False)
    peak_bytes: int
    seconds: float


OnStep: TypeAlias = Callable[[Step], None]


class Steps(Sequence[Step]):
    """What steps did for each of their requests, in order; what nobody looks at is not made."""

    def __init__(self) -> None:
        self._parts: list[Sequence[Step]] = []

    def add(self, part: Sequence[Step]) -> None:
        """Append what further steps did."""
        self._parts.append(part)

    def __add__(self, more: Sequence[Step]) -> Steps:
        both = Steps()
        both.add(self)
        both.add(more)
        return both

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @overload
    def __getitem__(self, at: int) -> Step: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Step]: ...
    def __getitem__(self, at: int | slice) -> Step | Sequence[Step]:
        return [*self][at]

    def __iter__(self) -> Iterator[Step]:
        return chain.from_iterable(self._parts)

    def __eq__(self, other: object) -> bool:
        return [*self] == [*other] if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr([*self])


def of_each(what: str, given: Any, prompts: int) -> list[Any]:
    """Return a list with one entry for each prompt; a single value is one entry."""
    if isinstance(given, np.ndarray | Tensor):
        several = given.ndim > 0
    else:
        several = isinstance(given, Sequence) and not isinstance(given, str) and not hasattr(given, "put")
    found = list(given) if several else [given]
    if len(found) != prompts:
        raise UsageError(f"{len(found)} {what} for {prompts} prompts; give a list of one for each prompt.")
    return found
