"""Forced canvases: a policy's own decisions, step by step, on the canvases that another run went through.

`recording` writes down what each step of a run decided. `forced` runs the same algorithm again, perhaps with other options;
each step's decisions are compared with the record and then replaced by it, so that both see the same tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from mosaic.decoding import ALGORITHMS, Algorithm, Canvas, GenerationConfig, resolve
from mosaic.decoding.algorithms import algorithm_of
from mosaic.models.parts.cut import KEPT

if TYPE_CHECKING:
    from mosaic.decoding.canvas import Steps
    from mosaic.models.architecture import Architecture
    from mosaic.runtime.steps import StepRequest, StepResult

__all__ = ["Agreement", "Decided", "Records", "forced", "recording"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The decisions of one step: positions int64 [M] of its open rows, tokens int64 [M], and bool [M], the committed.

    Of the tokens of its block it computed `computed` in all layers, and of the block before `again`. On a model that attends in
    both directions `computed` are all that it computed.
    """

    positions: Tensor
    token_ids: Tensor
    committed: Tensor
    block: int
    computed: int = 0
    again: int = 0


Records: TypeAlias = dict[int, list[Decided]]
"""By request, its steps that decide rows, in order."""


@dataclass(slots=True)
class Agreement:
    """Sums over the forced steps of one request, a block's first steps and the others apart.

    Attributes
    ----------
    rows, rows_agree
        Open rows, and those whose token is that of the record.
    committed, committed_agree
        Rows that the record commits, and those of them whose token is the same.
    own
        Rows that the step itself would commit.
    """

    rows: list[int] = field(default_factory=lambda: [0, 0])
    rows_agree: list[int] = field(default_factory=lambda: [0, 0])
    committed: list[int] = field(default_factory=lambda: [0, 0])
    committed_agree: list[int] = field(default_factory=lambda: [0, 0])
    own: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, step: Decided, record: Decided, *, later: bool) -> None:
        """Compare one step."""
        same = step.token_ids == record.token_ids
        self.rows[later] += same.numel()
        self.rows_agree[later] += int(same.sum())
        self.committed[later] += int(record.committed.sum())
        self.committed_agree[later] += int((same & record.committed).sum())
        self.own[later] += int(step.committed.sum())


def recording(config: GenerationConfig, architecture: Architecture, records: Records) -> GenerationConfig:
    """Return options that decode as `config` does, and record every step's decisions."""

    def keep(canvas: Canvas, step: Decided, result: StepResult) -> StepResult:
        records.setdefault(canvas.request, []).append(step)
        return result

    return _watched(config, architecture, keep)


def forced(
    config: GenerationConfig, architecture: Architecture, records: Records, agreements: dict[int, Agreement]
) -> GenerationConfig:
    """Return options that go through the recorded canvases, and compare every step's decisions with the record."""
    place: dict[int, int] = defaultdict(int)

    def replay(canvas: Canvas, step: Decided, result: StepResult) -> StepResult:
        index, steps = place[canvas.request], records[canvas.request]
        place[canvas.request] += 1
        record = steps[index]
        assert torch.equal(step.positions, record.positions)
        later = index > 0 and steps[index - 1].block == record.block
        agreements.setdefault(canvas.request, Agreement()).add(step, record, later=later)
        chosen = torch.where(record.committed, record.token_ids, result.chosen)
        return replace(result, committed=record.committed, chosen=chosen)

    return _watched(config, architecture, replay)


def _watched(
    config: GenerationConfig,
    architecture: Architecture,
    outcome: Callable[[Canvas, Decided, StepResult], StepResult],
) -> GenerationConfig:
    """The options' own algorithm; it gets the result of every step that decides rows through `outcome`."""
    own = resolve(config, architecture)
    inner = algorithm_of(own)

    def decode(canvas: Canvas) -> Steps:
        steps = inner.decode(canvas)
        request = next(steps, None)
        while request is not None:
            result: StepResult = yield request
            if request.rows.numel():
                result = outcome(canvas, _decided(canvas, request, result), result)
            try:
                request = steps.send(result)
            except StopIteration:
                return

    name = str(own.algorithm)  # which, with a cache, another algorithm may decode
    watched = Algorithm(name=f"{name}, watched", decode=decode, shapes=inner.shapes, traits=ALGORITHMS[name])
    return replace(own, algorithm=watched)


def _decided(canvas: Canvas, request: StepRequest, result: StepResult) -> Decided:
    block, count, places = canvas.config.block_length or 1, request.token_ids.numel(), request.values.get("positions")
    positions = request.rows + request.start  # also of one just past the window
    if places is not None:
        positions = torch.where(request.rows < count, places.long()[request.rows.clamp(max=count - 1)], positions)
    first = int(positions[0]) // block * block
    again = min(max(first - request.start, 0), count) if places is None else int((places < first).sum())
    again = again if canvas.architecture.block else 0
    kept = result.values.get(KEPT)
    dropped = 0 if kept is None else kept.numel() - int(kept.sum())
    return Decided(
        positions=positions, token_ids=result.token.clone(), committed=result.committed.clone(), block=canvas.block,
        computed=count - again - dropped, again=again,
    )  # fmt: skip
