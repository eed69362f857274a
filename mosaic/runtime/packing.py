"""Requests of one phase packed into one step: the step's inputs.

The phase's parts declare the inputs (`mosaic.models.inputs`); this module knows no input by name.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain, repeat
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from mosaic.errors import UsageError
from mosaic.models.architecture import Architecture
from mosaic.models.inputs import Frequencies, Input, Window
from mosaic.models.parts.part import Part
from mosaic.models.phase import Phase
from mosaic.models.state import State
from mosaic.models.step import StepSize
from mosaic.runtime.frequencies import inverse_frequencies
from mosaic.runtime.host_inputs import Numbers
from mosaic.runtime.steps import StepRequest

if TYPE_CHECKING:
    from mosaic.planner.plan_records import PlanRecords
    from mosaic.planner.planner import SizedStep
    from mosaic.runtime.executor import Executor
    from mosaic.runtime.step_memory import HeldValues


@dataclass(frozen=True, kw_only=True)
class PackedStep:
    """One step over several requests, or of a program: its size, and its inputs by name.

    Tensors are on the host, or where the requests have them. Inputs of rows and keys may be shorter than the plan's,
    whose sizes are rounded up.
    """

    size: SizedStep
    inputs: Mapping[str, Tensor | Numbers]

    @cached_property
    def key(self) -> Hashable:
        """The key of its size, cached: a step that is launched repeatedly asks for it each time."""
        return self.size.key

    @cached_property
    def buckets(self) -> tuple[int, ...]:
        """For a cut step, the row counts that its second graph is planned for, ascending."""
        return self.size.buckets

    def graph(self, kept: int = 0) -> Self:
        """Return the first graph of a two-graph step, or the second for `kept` rows, with all inputs; cached."""
        if kept not in self._graphs:
            self._graphs[kept] = replace(self, size=self.size.graph(kept))
        return self._graphs[kept]

    @cached_property
    def _graphs(self) -> dict[int, Self]:
        return {}

    @property
    def first(self) -> Self:
        """The step, or the first graph of one of two graphs."""
        return self if self.size.bucketed is None else self.graph()

    def with_inputs(self, given: Mapping[str, Tensor | Numbers]) -> Self:
        """Return a step of the same size, with other values of some inputs."""
        return replace(self, inputs={**self.inputs, **given})

    def check(self, records: PlanRecords, held: HeldValues) -> None:
        """Make sure that values that the step reads of the last step exist, before anything changes."""
        if self.size.follows:
            held.require(self.size.name, records)

    def write(self, executor: Executor) -> None:
        """Write the inputs of the graph that is bound."""
        executor.write(self._taken_by(executor))

    def _taken_by(self, executor: Executor) -> Mapping[str, Tensor | Numbers]:
        """The inputs of a graph; the same mapping every time."""
        if self.size.takes_all:
            return self.inputs
        names = executor.inputs
        if self._taken.keys() != names.keys():
            self._taken.update({name: self.inputs[name] for name in names})
        return self._taken

    @cached_property
    def _taken(self) -> dict[str, Tensor | Numbers]:
        return {}


def group_of(request: StepRequest, arch: Architecture) -> Hashable:
    """Give the part that requests of one step have in common: the phase that covers theirs, and the values that a step has once."""
    phase = request.phase.covering
    return phase, *_shared(request, _once(phase.inputs(arch)))


def pack_step(
    requests: Sequence[StepRequest], arch: Architecture, *, states: Mapping[State, int] | None = None
) -> PackedStep:
    """Pack the requests; for a guided phase, all requests, then a copy of each without its prompt.

    Parameters
    ----------
    arch
        The model's architecture.
    states
        Rows of each state, of all owners together.

    Raises
    ------
    UsageError
        If the requests differ in a value that a step has once, or lack a value that the phase needs.
    """
    if not requests:
        raise UsageError("a step needs at least one request.")
    phase = requests[0].phase
    declared = phase.inputs(arch)
    _require_shared(requests, declared)
    parts = [part for part in phase.parts if type(part).check is not Part.check]
    for request in requests:
        if min(_lengths(request)) < 1:
            raise UsageError(f"a window has at least one token, got windows of {list(_lengths(request))}.")
        for part in parts:
            part.check(request, arch)
    rows = sum(request.rows.numel() for request in requests)
    if phase.commit is not None and not rows:
        raise UsageError("a step with a head decides at least one row; leave the request out, or commit it.")
    windows = _windows(phase, requests)
    inputs = {entry.name: _packed(entry, requests, windows) for entry in declared}
    return PackedStep(size=_size(phase, requests, max(rows, 1), states or {}), inputs=inputs)


def _require_shared(requests: Sequence[StepRequest], declared: Sequence[Input]) -> None:
    once, (first, *others) = _once(declared), requests
    mine = first.phase, *_shared(first, once)
    for request in others:
        if (own := (request.phase, *_shared(request, once))) != mine:
            names = ("phase", *[entry.name for entry in once])
            name, value, other = next(found for found in zip(names, mine, own, strict=True) if found[1] != found[2])
            raise UsageError(
                f"requests of one step share their {name}, got {value} and {other}; run them in steps of their own."
            )


def _once(declared: Sequence[Input]) -> list[Input]:
    return [entry for entry in declared if entry.per == "step"]


def _shared(request: StepRequest, once: Sequence[Input]) -> tuple[Any, ...]:
    """What a step has once."""
    return tuple([entry.of(request) for entry in once])


def _lengths(request: StepRequest) -> tuple[int, ...]:
    return request.lengths or (request.token_ids.numel(),)


def _size(phase: Phase, requests: Sequence[StepRequest], rows: int, states: Mapping[State, int]) -> StepSize:
    kept = [seen for request in requests if (seen := phase.cache.seen(request)) is not None]
    returned = sum(len(r.logit_rows) for r in requests if r.logit_rows is not None)
    return StepSize(
        phase=phase, windows=tuple(length for request in requests for length in _lengths(request)),
        keys=tuple(seen.keys for seen in kept), owned=tuple(seen.owned for seen in kept),
        extents=sum(seen.extents for seen in kept), rows=rows, logit_rows=returned, states=states,
    )  # fmt: skip


def _windows(phase: Phase, requests: Sequence[StepRequest]) -> list[Window]:
    """The windows in packed order: those of all requests, then those of all copies."""
    found: list[Window] = []
    of_requests = [phase.windows(request) for request in requests]
    for copy in range(phase.copies):
        for request, tokens in zip(requests, of_requests, strict=True):
            whole = tokens[copy]
            for part in whole.split(request.lengths) if request.lengths else (whole,):
                found.append(Window(request=request, token_ids=part, number=len(found), start=request.start, copy=copy))
    return found


def _packed(entry: Input, requests: Sequence[StepRequest], windows: Sequence[Window]) -> Tensor | Numbers:
    """The values of one input, in its dtype if they are made here."""
    if entry.per == "step":
        return Numbers((entry.of(requests[0]),), entry.dtype)
    if entry.joint:
        assert callable(entry.value)
        return torch.from_numpy(entry.value(windows))
    if entry.per == "bound":
        return Numbers((0, *accumulate(entry.of_all(windows))), entry.dtype)
    if entry.per == "sequence":
        values = entry.of_all(windows)
        return torch.stack(list(map(_vector, values))) if entry.width else Numbers(tuple(values), entry.dtype)
    if entry.per == "extent":
        numbers = chain.from_iterable(chain.from_iterable(entry.of_all(windows)))
        return Numbers(tuple(numbers), entry.dtype, entry.width)
    if entry.per in ("row", "logit_row"):
        values = [entry.of(request) for request in requests]
        if entry.index:
            return _of_step(entry, requests, values)
        counts = [request.rows.numel() for request in requests]
        if not any(isinstance(value, Tensor) for value in values):
            return Numbers(tuple(chain.from_iterable(map(repeat, values, counts))), entry.dtype)
        return _joined([_values(value, count, entry.dtype) for value, count in zip(values, counts, strict=True)])
    found = entry.of_all(windows)
    if all(isinstance(part, range | tuple) for part in found):
        ranges = [(part,) if isinstance(part, range) else part for part in found]
        return Numbers(tuple(chain.from_iterable(ranges)), entry.dtype)
    parts = zip(found, windows, strict=True)
    return _joined([_values(part, window.length, entry.dtype) for part, window in parts])


def _of_step(entry: Input, requests: Sequence[StepRequest], values: Sequence[Tensor]) -> Tensor:
    """Convert row numbers of requests to row numbers of the step, or of its copies."""
    tokens, counts = [request.token_ids.numel() for request in requests], [rows.numel() for rows in values]
    found = _joined(values)
    rows = found.cpu().numpy()
    wrong = ((rows < 0) | (rows >= np.repeat(tokens, counts))).nonzero()[0]
    if len(wrong):
        at = int(np.repeat(np.arange(len(values)), counts)[wrong[0]])
        count = tokens[at]
        raise UsageError(f"rows of a window of {count} tokens are in [0, {count}), got {values[at].tolist()}.")
    firsts = [0, *accumulate(tokens)]
    own = torch.from_numpy(rows + np.repeat(np.array(firsts[:-1]) + entry.copy * firsts[-1], counts))
    return own.to(found.device)


def _values(found: Any, count: int, dtype: str) -> Tensor:
    """Return a tensor unchanged, ranges of numbers, or one number `count` times."""
    if isinstance(found, Tensor):
        return found
    if isinstance(found, range | tuple):
        return Numbers((found,) if isinstance(found, range) else found, dtype).tensor()
    return torch.full((count,), found, dtype=getattr(torch, dtype))


def _vector(found: Any) -> Tensor:
    if isinstance(found, Frequencies):
        return _frequencies(found.rotary, found.length)
    return torch.as_tensor(found)


_frequencies = lru_cache(maxsize=256)(inverse_frequencies)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
