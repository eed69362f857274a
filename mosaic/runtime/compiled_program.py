"""A compiled program: a user's registered steps, run by name on the engine.

Weights are loaded once; every plan has them at the same place. States and carries have ranges of their own: a state
keeps its rows from step to step, a carry its value until the next step that declares it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from torch import Tensor

from mosaic.errors import UnknownName, UsageError
from mosaic.planner.planner import Planner
from mosaic.registrar.bucketed import ProgramStep
from mosaic.registrar.program import Build, Program
from mosaic.runtime.engine import Engine
from mosaic.runtime.executor import Debug
from mosaic.runtime.face import Face
from mosaic.runtime.packing import PackedStep
from mosaic.runtime.step_plans import Settings
from mosaic.units import Size, parse_tokens

if TYPE_CHECKING:
    from mosaic.planner.plan import Plan
    from mosaic.planner.plan_records import PlanRecords
    from mosaic.registrar.graph import Graph
    from mosaic.runtime.executor import Executor
    from mosaic.runtime.step_memory import HeldValues

Dims: TypeAlias = Mapping[str, Size]
NO_DIMS: Final[Dims] = MappingProxyType({})
NO_INPUTS: Final[Mapping[str, Tensor]] = MappingProxyType({})


def program_of(source: Program | Build) -> Program:
    """Return a program, or one graph as a program of the step `step`."""
    if isinstance(source, Program):
        return source
    if not callable(source):
        raise UsageError(f"a program is a Program or a callable that registers a graph, got {source!r}.")
    program = Program(getattr(source, "__name__", "custom"))
    program.add_phase("step", source)
    return program


class CompiledProgram(Face):
    """A program whose every byte is planned. Run its steps by name; see `mosaic.compile`, which makes it.

    A step is planned and bound once for each size of its dims. The committed memory is the largest that steps have
    needed. Memory that only earlier steps needed is given back by `trim`, and by a step that would otherwise exceed the
    budget. Threads may share a program: it serves one call at a time.

    Parameters
    ----------
    planner
        Plans the program's steps, on the device and within the budgets.
    weights
        By the buffers' `tensor` field or name; random if not given.
    dims
        Values, for every step, of dims that are no axis of an input; a call's own override them.
    config
        Take these settings in every plan instead of searching; each step takes the settings that it has.

    Attributes
    ----------
    program
        What was registered.

    Examples
    --------
    >>> import mosaic, torch
    >>> def double(g):
    ...     n = g.dim("tokens")
    ...     x, w = g.input("x", (n, 2), "float32"), g.weight("w", (2, 2), "float32")
    ...     g.add_op("linear", x, w, out=g.output("y", (n, 2), "float32"))
    >>> with mosaic.compile(double, weights={"w": 2 * torch.eye(2)}) as program:
    ...     program(x=torch.ones(3, 2))["y"].tolist()
    [[2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]
    """

    def __init__(
        self,
        planner: Planner,
        *,
        weights: Mapping[str, Tensor] | None = None,
        dims: Dims = NO_DIMS,
        config: Settings | None = None,
        capture: bool = True,
        debug: Debug = None,
        seed: int = 0,
    ) -> None:
        program = planner.program
        assert program is not None
        if not program.steps:
            raise UsageError(f"the program '{program.name}' has no phase.")
        self.program, self._backend = program, planner.device.backend
        self._graphs: dict[str, Graph] = {}
        self._dims = {name: parse_tokens(value, what=f"the dim '{name}'") for name, value in dims.items()}
        first = program.steps[0]
        step = ProgramStep(name=first, sizes=self._sizes(first, self._smallest(first)))
        super().__init__(Engine(planner, step, given=weights, config=config, capture=capture, debug=debug, seed=seed))

    def _graph(self, step: str) -> Graph:
        """The graph of a phase or joined step, with the first option of every choice."""
        if step not in self._graphs:
            self._graphs[step] = self.program.graph(step, backend=self._backend)
        return self._graphs[step]

    def _smallest(self, step: str) -> dict[str, int]:
        """The known dims of a step, and 1 for unknown ones: weights do not depend on them."""
        found: dict[str, int] = {}
        for name, info in reversed(self._graph(step).dims.items()):  # a dim that bounds another comes first
            bounded = (found[other] for other, known in self._graph(step).dims.items() if known.at_most == name)
            found[name] = info.value or self._dims.get(name) or max(bounded, default=1)
        return found

    # --- plans ----------------------------------------------------------------------------------------------------

    def plan(self, step: str | None = None, **dims: Size) -> Plan:
        """Plan a step without running it. Of a bucketed step, give the plan that takes the most memory.

        Parameters
        ----------
        step
            A phase, a joined step or a bucketed one; may be left out if the program has one step.
        dims
            A value, a number or like "128k", for every dim that was not given to `compile`.

        Raises
        ------
        DoesNotFit
            If the step needs more than the budget.
        """
        with self._engine.turn():
            given = self._dims | {key: parse_tokens(value, what=f"the dim '{key}'") for key, value in dims.items()}
            graphs = self._step(self._named(step), given).graphs
            return max(map(self._engine.plans.plan, graphs), key=lambda plan: plan.total_bytes)

    def _named(self, step: str | None) -> str:
        known = (*self.program.steps, *self.program.bucketed)
        if step is None and len(known) > 1:
            raise UsageError(f"the program has several steps, name one: {', '.join(known)}.")
        name = known[0] if step is None else step
        if name not in known:
            raise UnknownName("step", name, known)
        return name

    def _step(self, name: str, dims: Mapping[str, int]) -> ProgramStep:
        """A step with the values of its dims; of a bucketed one, with the buckets within the bound of its dim."""
        how = self.program.bucketed.get(name)
        if how is None:
            return ProgramStep(name=name, sizes=self._sizes(name, dims))
        bound = self._graph(how.suffix).dims[how.dim].at_most
        buckets = how.sizes(dims, None if bound is None else dims.get(bound))
        suffix = self._sizes(how.suffix, {**dims, how.dim: buckets[0]})
        return ProgramStep(
            name=name, sizes=self._sizes(how.prefix, dims), bucketed=how, suffix_sizes=suffix, buckets=buckets
        )

    def _sizes(self, graph: str, dims: Mapping[str, int]) -> dict[str, int]:
        """The given dims that a graph has."""
        known = self._graph(graph).dims
        absent = [name for name, info in known.items() if info.value is None and name not in dims]
        if absent:
            raise UsageError(
                f"the step '{graph}' has dims that follow from no input's shape: {', '.join(map(repr, absent))}. Give them by "
                f"dims={{'{absent[0]}': ...}}."
            )
        return {name: size for name, size in dims.items() if name in known}

    # --- steps ----------------------------------------------------------------------------------------------------

    def __call__(self, step: str | None = None, /, *, dims: Dims = NO_DIMS, **inputs: Tensor) -> dict[str, Tensor]:
        """Run a step with its inputs by name; see `run`."""
        return self.run(step, inputs, dims=dims)

    def run(
        self, step: str | None = None, inputs: Mapping[str, Tensor] = NO_INPUTS, *, dims: Dims = NO_DIMS
    ) -> dict[str, Tensor]:
        """Run a step.

        A bucketed step runs its prefix, reads the count that it computed, and runs its suffix in the smallest bucket
        that holds the count. All buckets are planned before that: if one does not fit, nothing is run.

        Parameters
        ----------
        step
            As for `plan`.
        inputs
            By the names of the step's inputs, in their dtypes, on any device. Dims that are an axis of an input are
            read from its shape. A bucketed step takes the inputs of both phases; an input of both is given once.
        dims
            Values of other dims. A state has as many rows as its shape says: rows beyond are lost, new rows zero.

        Returns
        -------
        dict
            Outputs by name; of a bucketed step, its suffix's. They are views of planned memory, valid until the next
            step, or copies if another thread may run a step in between.

        Raises
        ------
        UsageError
            If inputs or dims are missing, unknown or disagree, or a carry is read that was not written before.
        BucketOverflow
            If no bucket holds the count. The prefix has run, the suffix has not.
        DoesNotFit
            If the step needs more than the budget.
        """
        with self._engine.turn():
            name = self._named(step)
            how = self.program.bucketed.get(name)
            if how is not None and how.dim in dims:
                raise UsageError(f"the step '{name}' computes '{how.dim}': leave it out of `dims`.")
            phases = [name] if how is None else [how.prefix, how.suffix]
            if how is not None:
                _require_known(inputs, {key for phase in phases for key in self._input_shapes(phase)})
            size = self._step(name, self._dims_of(phases, inputs, dims))
            outputs = self._engine.run(_GivenStep(size=size, inputs=inputs, shared=how is not None)).outputs
            lent = self._engine.lend(outputs.values())
            return dict(outputs) if lent else {key: value.clone() for key, value in outputs.items()}

    # --- dims -----------------------------------------------------------------------------------------------------

    def _input_shapes(self, step: str) -> dict[str, Sequence[Any]]:
        return {b.name: b.shape for b in self._graph(step).buffers if b.kind == "input"}

    def _dims_of(self, phases: Sequence[str], inputs: Mapping[str, Tensor], dims: Dims) -> dict[str, int]:
        """The dims of a step: from the call, the axes of its inputs, and the program."""
        found = {name: parse_tokens(value, what=f"the dim '{name}'") for name, value in dims.items()}
        said = dict.fromkeys(found, "dims")
        for name, dim, size in (entry for phase in phases for entry in self._axes(phase, inputs)):
            if found.setdefault(dim, size) != size:
                raise UsageError(f"the dim '{dim}' is {found[dim]:,} by {said[dim]} and {size:,} by input '{name}'.")
            said.setdefault(dim, f"input '{name}'")
        return self._dims | found

    def _axes(self, step: str, inputs: Mapping[str, Tensor]) -> Iterator[tuple[str, str, int]]:
        """Input, dim and size of every axis that is a dim."""
        for name, shape in self._input_shapes(step).items():
            if name not in inputs:
                continue
            if inputs[name].dim() != len(shape):
                got = list(inputs[name].shape)
                raise UsageError(f"input '{name}' of '{step}': expected {len(shape)} axes, got {got}.")
            for dim, size in zip(shape, inputs[name].shape, strict=True):
                if not isinstance(dim, int) and dim.name and self._graph(step).dims[dim.name].value is None:
                    yield name, dim.name, size

    # --- looking and leaving --------------------------------------------------------------------------------------

    @property
    def current(self) -> Plan:
        """The plan of the last step."""
        return self._engine.current

    def weights(self) -> Mapping[str, Tensor]:
        """Return views of all weights by the names of their buffers; streamed ones are in host memory."""
        with self._engine.turn():
            return MappingProxyType(self._engine.weights.views)

    def state(self, name: str) -> Tensor:
        """View a state with the rows of the last step, to read or to write; valid until the next step.

        Raises
        ------
        UsageError
            If no step has run yet, or there is no such state.
        """
        with self._engine.turn():
            return self._kept("state", name)

    def carry(self, name: str) -> Tensor:
        """View a carry as the last step had it; valid until the next step.

        Raises
        ------
        UsageError
            If the last step did not have it.
        """
        with self._engine.turn():
            return self._kept("carry", name)

    def _kept(self, kind: str, name: str) -> Tensor:
        for record in self.current.records.buffers:
            if record.kind == kind and record.name == name and self._engine.held.get(record.pool):
                return self.workspace.view(record.pool, 0, record.shape, record.dtype)
        held = [pool.removeprefix(f"{kind}/") for pool in self._engine.held if pool.startswith(f"{kind}/")]
        raise UsageError(f"no {kind} '{name}' holds anything; there are: {', '.join(held) or 'none yet'}.")


@dataclass(frozen=True, kw_only=True)
class _GivenStep(PackedStep):
    """A step of a program and the caller's inputs, which are not kept. `shared`: inputs that two graphs read."""

    inputs: Mapping[str, Tensor]
    shared: bool = False

    def check(self, records: PlanRecords, held: HeldValues) -> None:
        """Make sure that the graph's carries hold values, and that its inputs have the plan's shapes and dtypes."""
        super().check(records, held)
        known = {b.name: b for b in records.buffers if b.kind == "input"}
        if not self.shared:
            _require_known(self.inputs, known)
        absent = [name for name in known if name not in self.inputs]
        if absent:
            many = "s" if len(absent) > 1 else ""
            raise UsageError(f"the step '{self.size.name}' needs the input{many} {', '.join(absent)}.")
        for name, record in known.items():
            given = self.inputs[name]
            expected = f"{record.dtype} {list(record.shape)}"
            got = f"{str(given.dtype).removeprefix('torch.')} {list(given.shape)}"
            if got != expected:
                raise UsageError(f"input '{name}' of '{self.size.name}': expected {expected}, got {got}.")

    def write(self, executor: Executor) -> None:
        """Copy the inputs."""
        for name, view in executor.inputs.items():
            view.copy_(self.inputs[name])


def _require_known(given: Iterable[str], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise UnknownName("input", name, sorted(known))
