"""Parts of a step alone: its launches by kind, those of a kind run by themselves, on a card from a CUDA graph.

What a step leaves in its workspace is no input for a part of it: buffers share bytes, so where indices were there may be hidden
states now. So a step is run launch by launch, and what a launch is about to read of buffers that live within the step is copied:
integers for each launch, since they say where memory is read and written; numbers once for each place, since any will do. Parts
run on these copies, on the weights and on the states. So they read and write no place that the step does not. What they leave in
the states, keys and values among them, is of no use: the requests of the step must not go on. The next ones that take these rows
write them before they read them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from benchmarks.step_kernels import KINDS, kind_of
from mosaic.planner.plan_records import PlanRecords, records_in
from mosaic.registrar.operators import find
from mosaic.runtime.compiled import CompiledModel
from mosaic.runtime.executor import Call, Executor
from mosaic.runtime.steps import StepRequest

__all__ = ["Launch", "alone_ms", "launches_of"]

REPEATS: Final = 10
_WITHIN: Final = frozenset({"input", "transient", "carry", "output"})
"""Kinds of buffers that others overwrite: in the step, or in the one after it."""


class Launch(NamedTuple):
    """A launch of a step: its operator's name, the function, and its arguments, with copies of overwritten operands."""

    operator: str
    function: Callable[..., object]
    arguments: Mapping[str, Any]


def launches_of(model: CompiledModel, requests: Sequence[StepRequest]) -> dict[str, list[Launch]]:
    """Run a step, and return its launches by kind, in order; its outcome is thrown away.

    Parameters
    ----------
    requests
        Of the step. It is run at least once more than it has been, so nothing may go on from what it leaves.
    """
    while True:
        known, noting = model.executors, _Noting()
        with ExitStack() as watching:
            for executor in known:
                watching.enter_context(executor.watched(partial(noting.note, executor)))
            model.step(requests)
        if {*model.executors} == {*known}:  # else a part of the step was bound during it
            graphs = 1 if requests[0].phase.bucketed is None else 2
            assert noting.graphs >= graphs, (
                "a plan that serves a single step is bound anew each time, and cannot be watched"
            )
            return noting.found


class _Noting:
    """Launches by kind, as they are told."""

    def __init__(self) -> None:
        self.found: dict[str, list[Launch]] = {kind: [] for kind in KINDS}
        self._records: dict[Executor, PlanRecords] = {}
        self._numbers: dict[tuple[object, ...], Tensor] = {}

    @property
    def graphs(self) -> int:
        """How many graphs have run."""
        return len(self._records)

    def note(self, executor: Executor, call: Call) -> None:
        if executor not in self._records:
            self._records[executor] = records_in(executor.document)
        records = self._records[executor]
        op = records.ops[call.op]
        if call.name != op.name:  # an event between streams: parts run on one
            return
        operator = find(op.kernel, {})
        assert operator is not None
        within = {
            name
            for name in (read.rstrip("?") for read in operator.reads)
            if name in op.operands and records.buffers[op.operands[name]].kind in _WITHIN
        }
        copied = {name: self._copy(value) for name, value in call.arguments.items() if name in within}
        self.found[kind_of(op.kernel)].append(Launch(op.kernel, call.function, {**call.arguments, **copied}))

    def _copy(self, value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return _alike(value)
        place = value.data_ptr(), value.shape, value.stride(), value.dtype
        if place not in self._numbers:
            self._numbers[place] = _alike(value)
        return self._numbers[place]


def _alike(value: Tensor) -> Tensor:
    """A copy that is laid out in the same way."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


def alone_ms(launches: Sequence[Launch], *, on_card: bool) -> float:
    """Return the milliseconds of some launches in their order: of a graph of them on a card, once and as they are on a CPU."""
    if not launches:
        return 0.0
    if not on_card:
        began = time.perf_counter()
        _run(launches)
        return 1e3 * (time.perf_counter() - began)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        _run(launches)  # libraries allocate for a stream before a capture
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        _run(launches)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    graph.replay()
    begin.record()
    for _ in range(REPEATS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPEATS


def _run(launches: Iterable[Launch]) -> None:
    for launch in launches:
        launch.function(**launch.arguments)
