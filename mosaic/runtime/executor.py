"""Executor: binds a plan document to memory once, then runs a flat list of kernel launches. A step allocates nothing.

Views are made and chunk loops unrolled when a plan is bound; `run` walks the resulting list, or replays it from a CUDA
graph. The executor follows the plan to the byte and does not verify it: the checker does, and `debug="poison"` exposes
a wrong plan.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, Final, Literal

from torch import Tensor

from mosaic.errors import PlanFormatError, UsageError
from mosaic.planner.check import WeightMap
from mosaic.planner.plan_records import records_in
from mosaic.registrar.operator import Operator
from mosaic.runtime.graph_memory import GraphMemory, NoRoom
from mosaic.runtime.host_inputs import HostInputs, Numbers
from mosaic.runtime.poison import Poison
from mosaic.runtime.regions import Regions
from mosaic.runtime.streams import MAIN, CudaStreams, device_lost
from mosaic.runtime.unroll import Arguments, Segment, Step, Unroller
from mosaic.runtime.views import Views
from mosaic.runtime.weight_guard import WeightGuard
from mosaic.runtime.weights import require_in_place
from mosaic.runtime.workspace import HOST, Workspace

Debug = Literal["poison"] | None
SCHEMA: Final = "mosaic.plan/1"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a step: the index and name of its op, its stream, the function and its arguments.

    Besides launches, calls record events on streams and make streams wait for them.
    """

    op: int
    name: str
    stream: str
    function: Callable[..., object]
    arguments: Mapping[str, Any]


class Executor:
    """A plan bound to a workspace.

    Parameters
    ----------
    plan
        A plan document (`mosaic.plan/1`), or an object with one as `document`.
    workspace
        Its pools must be committed as far as the plan reaches.
    operators
        Operators of the plan's ops that Mosaic does not ship, by name, in addition to the operators that a `Plan`
        object carries. A document read from a file carries none, and nothing is imported by a name found in it.
    tensors
        Tensors to use for weight, state and external buffers instead of the plan's offsets, by the buffers' `tensor`
        names: parameters adopted from a module.
    weights
        Where the weights were loaded, in the form of `Plan.weights`: a plan that has them elsewhere is refused. If not
        given, nothing is compared.
    debug
        "poison": fill every buffer with NaN (integers with their least value) before and after its lifetime, and the
        bytes between weights; a step that changes a weight, by checksum, raises.
    streams
        The streams of the device, which the executors of a model share. If not given, a plan for cuda gets its own, and
        a plan for the cpu runs in program order.
    capture
        Run the first step launch by launch, which compiles and loads its kernels; capture the second step into a CUDA
        graph; replay that from then on. A poisoned step is not captured.
    graphs
        Where the graphs of all executors of a device are kept. A graph that was dropped there is captured again by the
        next step. If not given, the graph is kept as long as the executor.

    Attributes
    ----------
    records
        The typed records of the plan.
    inputs, outputs
        Views by name: write the inputs before each `run`; the outputs are valid until the next `run`.
    captured
        Whether steps are replayed from a graph.
    not_captured
        Why `capture` did not succeed; None before the second step, or if it did.
    """

    def __init__(
        self,
        plan: Any,
        workspace: Workspace,
        *,
        operators: Mapping[str, Operator] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        weights: WeightMap | None = None,
        debug: Debug = None,
        streams: CudaStreams | None = None,
        capture: bool = False,
        graphs: GraphMemory | None = None,
    ) -> None:
        self.document: Mapping[str, Any] = getattr(plan, "document", plan)
        self.records = records_in(plan)
        if self.document.get("schema") != SCHEMA:
            raise PlanFormatError(
                f"the plan's schema is {self.document.get('schema')!r}, this runtime runs '{SCHEMA}'."
            )
        if debug not in (None, "poison"):
            raise UsageError(f"debug is None or 'poison', got {debug!r}.")
        if weights is not None:
            require_in_place(self.document, weights)
        self.workspace, self.debug = workspace, debug
        self._streams = CudaStreams() if streams is None and self.document.get("backend") == "cuda" else streams
        self._capture, self._warm = capture, False
        self._watch: Callable[[Call], object] | None = None
        self._graphs, self._key = graphs if graphs is not None else GraphMemory(), object()
        self._captured_over = 0  # `_host_changes` at the capture: copies are tied to a registration
        self.not_captured: str | None = None
        if capture and (debug is not None or self._streams is None):
            self._capture = False
            self.not_captured = "it is poisoned" if debug is not None else "the cpu has no graphs"
        regions = Regions(self.records)
        self._views = Views(self.records, regions, workspace, dict(tensors or {}))
        self.inputs, self.outputs = self._named("input"), self._named("output")
        self._writer = HostInputs(self.inputs)
        self._uses_host = any(pool.name == HOST and pool.capacity for pool in self.records.pools)
        poison = Poison(self.records, regions, self._views) if debug == "poison" else None
        self._guard = WeightGuard(self.records, self._views, workspace) if debug == "poison" else None
        brought = {**getattr(plan, "operators", {}), **(operators or {})}
        unroller = Unroller(self.records, brought, regions, self._views, self._streams, poison)
        self.segments: tuple[Segment, ...] = unroller.segments()

    def _host_changes(self) -> int:
        """How often the pinned memory of the plan's copies has grown or shrunk."""
        return self.workspace.range(HOST).changes if self._uses_host else 0

    def _named(self, kind: str) -> Mapping[str, Tensor]:
        mine = {b.name: self._views.whole(b.id) for b in self.records.buffers if b.kind == kind}
        return MappingProxyType(mine)

    # --- what callers see -----------------------------------------------------------------------------------------

    def write(self, values: Mapping[str, Tensor | Numbers]) -> None:
        """Write inputs by name; if there are fewer values than the plan has rows, the last value is repeated."""
        self._writer.write(values)

    @property
    def captured(self) -> bool:
        """Whether steps are replayed from a graph."""
        return self._key in self._graphs

    @property
    def is_ready(self) -> bool:
        """Whether it has run, and is captured if it is to be."""
        return self._warm and (self.captured or not self._capture)

    def drop_graph(self) -> None:
        """Drop the captured graph, if there is one: the next step captures it again."""
        self._graphs.drop(self._key)

    @property
    def calls(self) -> tuple[Call, ...]:
        """All calls of a step in order, one per iteration of every loop; built on each access."""
        return tuple(
            Call(
                op=step.op,
                name=step.name,
                stream=step.stream,
                function=step.function,
                arguments={**step.arguments, **more},
            )
            for step, more in self._listed()
        )

    def buffer(self, name: str) -> Tensor:
        """View a whole buffer by name; its contents are what the last op wrote there."""
        for record in self.records.buffers:
            if record.name == name:
                return self._views.whole(record.id)
        raise UsageError(f"the plan has no buffer '{name}'.")

    # --- running --------------------------------------------------------------------------------------------------

    @contextmanager
    def watched(self, watch: Callable[[Call], object]) -> Iterator[None]:
        """Until the block is left, run steps launch by launch on one stream, and show each call before it is made.

        The inputs of a call are complete when it is shown. A captured step stays captured, and is replayed again
        afterwards.
        """
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    def run(self) -> None:
        """Run the step. Inputs are read from `inputs`; afterwards the results stand in `outputs`.

        On a device it runs on streams of its own, after the caller's current stream, which then waits for it. The call
        returns when everything is launched. If it raises, Ctrl-C included, no part of the step runs on.

        Raises
        ------
        DeviceLost
            If the device does not work any more. Launches are asynchronous, so a later call may be the first to raise.
        WeightsChanged
            If the step is poisoned and wrote to a weight.
        """
        if self._guard is None:
            self._run()
            return
        self._guard.begin()
        self._run()
        self._guard.end()

    def in_parts(self, share: float) -> Generator[None]:
        """Run the step launch by launch, in parts of at most `share` of its FLOPs or one launch; yield between two of them.

        Steps in other memory may run there. On a device two parts are on their way at most. Closing the iterator leaves out what
        was not launched, and waits for the rest.
        """
        sent = [] if self._streams is None else [self._streams.event(), self._streams.event()]
        if self._guard is not None:
            self._guard.begin()
        try:
            for number, part in enumerate(self._parts(share)):
                if number:
                    yield
                if sent:
                    with _lost_said():
                        sent[number % 2].synchronize()
                self._on_streams(partial(self._walk, part))
                if self._streams is not None:
                    self._streams.record(sent[number % 2], MAIN)
        except GeneratorExit:
            if self._streams is not None:
                self._streams.drain()
            raise
        if self._guard is not None:
            self._guard.end()

    def _parts(self, share: float) -> Iterator[Sequence[tuple[Step, Arguments]]]:
        """The calls of a step, cut where a part would have more than `share` of the step's FLOPs."""
        ops, listed = self.records.ops, [*self._listed()]
        times = Counter(step.op for step, _ in listed if step.name == ops[step.op].name)
        most = share * sum(op.flops for op in ops)
        part, spent = list[tuple[Step, Arguments]](), 0.0
        for step, arguments in listed:
            flops = ops[step.op].flops / times[step.op] if step.name == ops[step.op].name else 0.0
            if spent and spent + flops > most:
                yield part
                part, spent = [], 0.0
            part.append((step, arguments))
            spent += flops
        yield part

    def _run(self) -> None:
        if self._streams is not None and self._watch is None:
            graph = self._graphs.find(self._key)
            if graph is not None and self._captured_over == self._host_changes():
                with _lost_said():
                    self._streams.replay(graph)
                return
        self._on_streams(self._launch)

    def _on_streams(self, launch: Callable[[], object]) -> None:
        if self._streams is None:
            launch()
            return
        with _lost_said(), self._streams.step():
            launch()

    def _launch(self) -> None:
        if self._watch is not None:
            self._show(self._watch)
        elif not (self._capture and self._warm and self._try_capture()):
            self._walk()
            self._warm = True

    def _try_capture(self) -> bool:
        """Capture the step and launch it; return whether it was launched. If it cannot be captured, warn once and do
        not try again."""
        assert self._streams is not None
        try:
            self._captured_over = self._host_changes()
            self._graphs.capture(self._key, partial(self._streams.capture, self._walk))
        except NoRoom as error:
            self._never_again(str(error))
        except Exception as error:
            if device_lost(error) is not None:
                raise
            self._never_again(str(error))
            return False
        return True

    def _never_again(self, why: str) -> None:
        self._capture, self.not_captured = False, why
        _log.warning("the step is not captured into a CUDA graph, it runs launch by launch: %s", why)

    def _show(self, watch: Callable[[Call], object]) -> None:
        for call in self.calls:
            watch(call)
            call.function(**call.arguments)

    def _listed(self) -> Iterator[tuple[Step, Arguments]]:
        """All calls of a step in order, with their further arguments."""
        return chain.from_iterable(
            zip(segment.steps, row, strict=True) for segment in self.segments for row in _rows(segment)
        )

    def _walk(self, calls: Iterable[tuple[Step, Arguments]] | None = None) -> None:
        step = None
        try:
            with nullcontext() if self._warm or self.document.get("backend") != "cuda" else _kernels_kept():
                for step, arguments in self._listed() if calls is None else calls:
                    step.call(**arguments)
        except Exception as error:
            assert step is not None
            error.add_note(f"in op {step.op} ({step.name}) of the plan")
            raise


def _kernels_kept() -> AbstractContextManager[None]:
    """Take kernels from this user's folder, and keep there what is compiled."""
    from mosaic.kernels.cuda.shared.kept import kernel_folder

    return kernel_folder().in_force()


@contextmanager
def _lost_said() -> Iterator[None]:
    """Raise `DeviceLost` in place of an error that says so."""
    try:
        yield
    except Exception as error:
        lost = device_lost(error)
        if lost is None:
            raise
        for note in getattr(error, "__notes__", ()):
            lost.add_note(note)
        raise lost from error


def _rows(segment: Segment) -> Iterator[tuple[Arguments, ...]]:
    """The further arguments of all steps of a segment, row by row."""
    return islice(zip(*segment.tables, strict=True), segment.first, segment.last)
