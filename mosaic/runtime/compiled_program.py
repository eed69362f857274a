"""A compiled program: the steps that a user has registered, planned at their sizes, bound once, and run.

Weights are loaded once, to where every plan has them. States and carries have ranges of their own: a state keeps its rows
from step to step, a carry its value from one step to the next one that declares it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from torch import Tensor

from mosaic.errors import UnknownName, UsageError
from mosaic.planner.custom import ProgramPlanner, Settings
from mosaic.planner.limits import MemoryBytes
from mosaic.registrar.program import Build, Program
from mosaic.runtime.engine import Engine
from mosaic.runtime.executor import Debug
from mosaic.runtime.face import Face
from mosaic.runtime.opening import usable_device
from mosaic.runtime.recent import Recent
from mosaic.runtime.step_plans import does_not_fit
from mosaic.runtime.weights import commit_weights, place_weights
from mosaic.units import Size, parse_tokens

if TYPE_CHECKING:
    from mosaic.devices import Device
    from mosaic.planner.plan import Plan
    from mosaic.planner.plan_records import PlanBuffer
    from mosaic.registrar.program import BucketedStep

__all__ = ["CompiledProgram", "compile_program"]

Dims: TypeAlias = Mapping[str, Size]
NO_DIMS: Final[Dims] = MappingProxyType({})
NO_INPUTS: Final[Mapping[str, Tensor]] = MappingProxyType({})
_KEPT_PLANS: Final = 128


def compile_program(
    program: Program | Build,
    *,
    weights: Mapping[str, Tensor] | None = None,
    dims: Dims = NO_DIMS,
    device: Device | str | None = "cpu",
    budget: Size | None = None,
    host_budget: Size | None = None,
    config: Settings = None,
    capture: bool = True,
    debug: Debug = None,
    seed: int = 0,
) -> CompiledProgram:
    """Compile a `Program`, or one graph as a program of the step `step`; see `mosaic.compile`."""
    if not isinstance(program, Program):
        if not callable(program):
            raise UsageError(f"a program is a Program or a callable that registers a graph, got {program!r}.")
        build, program = program, Program(getattr(program, "__name__", "custom"))
        program.add_phase("step", build)
    planner = ProgramPlanner(program, device=usable_device(device), budget=budget, host_budget=host_budget)
    return CompiledProgram(
        planner, weights=weights, dims=dims, config=config, capture=capture, debug=debug, seed=seed
    )  # fmt: skip


class CompiledProgram(Face):
    """A program whose every byte is planned. Run its steps by name; see `mosaic.compile`, which makes it.

    A step is planned and bound once for each size of its dims. Committed memory is the most that steps have needed. What
    only earlier steps needed goes back on `trim`, and wherever a step would exceed the budget otherwise. Threads may share
    a program: it serves one call at a time.

    Parameters
    ----------
    planner
        Plans the program's steps, on the device and within the budgets.
    weights
        By the buffers' `tensor`, or by their names; drawn at random if not given.
    dims
        Values of dims that follow from no input's shape, for every step; a call's own come before them.
    config
        Take these settings in every plan instead of searching; each step takes its own part of them.

    Attributes
    ----------
    program
        What was registered.

    Examples
    --------
    >>> import torch
    >>> def double(g):
    ...     n = g.dim("tokens")
    ...     x, w = g.input("x", (n, 2), "float32"), g.weight("w", (2, 2), "float32")
    ...     g.add_op("linear", x, w, out=g.output("y", (n, 2), "float32"))
    >>> with compile_program(double, weights={"w": 2 * torch.eye(2)}) as program:
    ...     program(x=torch.ones(3, 2))["y"].tolist()
    [[2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]
    """

    def __init__(
        self,
        planner: ProgramPlanner,
        *,
        weights: Mapping[str, Tensor] | None = None,
        dims: Dims = NO_DIMS,
        config: Settings = None,
        capture: bool = True,
        debug: Debug = None,
        seed: int = 0,
    ) -> None:
        self.program, self._planner, self._config = planner.program, planner, config
        if not self.program.steps:
            raise UsageError(f"the program '{self.program.name}' has no phase.")
        self._dims = {name: parse_tokens(value, what=f"the dim '{name}'") for name, value in dims.items()}
        self._plans: Recent[Hashable, Plan] = Recent(_KEPT_PLANS)
        first = self.program.steps[0]
        plan = self._fitting(first, self._smallest(first))
        super().__init__(Engine(planner, plan, "program", capture=capture, debug=debug))
        try:
            commit_weights(plan, self.workspace)
            self._weights = place_weights(plan, self.workspace, weights, seed=seed)
        except BaseException:
            self._engine.close()
            raise
        self._places = plan.weights

    def _smallest(self, step: str) -> dict[str, int]:
        """The dims of a step as far as they are known, and 1 else: what weights do not depend on."""
        found: dict[str, int] = {}
        for name, info in reversed(self._planner.graph(step).dims.items()):  # a bound comes before what it bounds
            bounded = (found[other] for other, known in self._planner.graph(step).dims.items() if known.at_most == name)
            found[name] = info.value or self._dims.get(name) or max(bounded, default=1)
        return found

    # --- plans ----------------------------------------------------------------------------------------------------

    def plan(self, step: str | None = None, **dims: Size) -> Plan:
        """Plan a step without running it. Of a bucketed step, give the plan that takes the most memory.

        Parameters
        ----------
        step
            A phase, a joined step or a bucketed one; not needed where there is one only.
        dims
            A value for every dim that was not given to `compile`: a number, or like "128k".

        Raises
        ------
        DoesNotFit
            If the step needs more than the budget.
        """
        with self._engine.turn():
            name = self._named(step)
            given = self._dims | {key: parse_tokens(value, what=f"the dim '{key}'") for key, value in dims.items()}
            bucketed = self.program.bucketed.get(name)
            if bucketed is None:
                return self._fitting(name, given)
            return max(self._all_buckets(bucketed, given), key=lambda plan: plan.total_bytes)

    def _named(self, step: str | None) -> str:
        known = (*self.program.steps, *self.program.bucketed)
        if step is None and len(known) > 1:
            raise UsageError(f"the program has several steps, name one: {', '.join(known)}.")
        name = known[0] if step is None else step
        if name not in known:
            raise UnknownName("step", name, known)
        return name

    def _fitting(self, step: str, dims: Mapping[str, int]) -> Plan:
        """Plan a step that fits, or find its plan."""
        self._require_dims(step, dims)
        return self._plans.find(self._key(step, dims), lambda: self._made(step, dims))

    def _made(self, step: str, dims: Mapping[str, int]) -> Plan:
        """Plan a step, or say what it lacks."""
        plan = self._planner.plan(step, dims, config=self._config)
        if plan.fits:
            return plan
        sizes = ", ".join(f"{name} = {size:,}" for name, size in plan.dims.items())
        needed, budget = (
            MemoryBytes(plan.total_bytes, plan.host_bytes),
            MemoryBytes(plan.budget_bytes, plan.host_budget_bytes),
        )
        raise does_not_fit(needed, budget, f"the step '{step}' ({sizes})", ". Raise it, or run smaller steps.")

    def _require_dims(self, step: str, dims: Mapping[str, int]) -> None:
        known = self._planner.graph(step).dims
        absent = [name for name, info in known.items() if info.value is None and name not in dims]
        if absent:
            raise UsageError(
                f"the step '{step}' has dims that follow from no input's shape: {', '.join(map(repr, absent))}. Give them by "
                f"dims={{'{absent[0]}': ...}}."
            )

    def _key(self, step: str, dims: Mapping[str, int]) -> Hashable:
        known = self._planner.graph(step).dims
        return step, tuple(sorted((name, size) for name, size in dims.items() if name in known))

    def _all_buckets(self, step: BucketedStep, dims: Mapping[str, int]) -> list[Plan]:
        """The plans of a bucketed step: the prefix's, and the suffix's of every bucket."""
        suffixes = [self._fitting(step.suffix, {**dims, step.dim: size}) for size in self._sizes_of(step, dims)]
        return [self._fitting(step.prefix, dims), *suffixes]

    def _sizes_of(self, step: BucketedStep, dims: Mapping[str, int]) -> tuple[int, ...]:
        """The buckets, none beyond what bounds the dim."""
        bound = self._planner.graph(step.suffix).dims[step.dim].at_most
        return step.sizes(dims, None if bound is None else dims.get(bound))

    # --- steps ----------------------------------------------------------------------------------------------------

    def __call__(self, step: str | None = None, /, *, dims: Dims = NO_DIMS, **inputs: Tensor) -> dict[str, Tensor]:
        """Run a step with its inputs by name; see `run`."""
        return self.run(step, inputs, dims=dims)

    def run(
        self, step: str | None = None, inputs: Mapping[str, Tensor] = NO_INPUTS, *, dims: Dims = NO_DIMS
    ) -> dict[str, Tensor]:
        """Run a step.

        A bucketed step runs its prefix, reads the count that it computed, and runs its suffix in the smallest bucket
        that holds the count. All buckets are planned before that: where one does not fit, nothing is run.

        Parameters
        ----------
        step
            As for `plan`.
        inputs
            By the names of the step's inputs, in their dtypes, on any device. Dims that are an axis of an input are read
            from its shape. A bucketed step takes the inputs of both phases; one that both have goes to both.
        dims
            Values of other dims. A state has the rows that its shape says: what is beyond them is lost, new rows are zero.

        Returns
        -------
        dict
            Outputs by name, of a bucketed step its suffix's: views of planned memory, valid until the next step; copies
            where another thread may run one meanwhile.

        Raises
        ------
        UsageError
            If inputs or dims are missing, unknown or do not agree, or a carry that is read was not written before.
        BucketOverflow
            If no bucket holds the count. The prefix has run by then, the suffix has not.
        DoesNotFit
            If the step needs more than the budget.
        """
        with self._engine.turn():
            self._engine.begin_step()
            name = self._named(step)
            bucketed = self.program.bucketed.get(name)
            if bucketed is None:
                found = self._step(name, inputs, self._dims_of([name], inputs, dims))
            else:
                found = self._two_steps(name, bucketed, inputs, dims)
            lent = self._engine.lend(found.values())
            return dict(found) if lent else {key: value.clone() for key, value in found.items()}

    def _two_steps(
        self, name: str, step: BucketedStep, inputs: Mapping[str, Tensor], dims: Dims
    ) -> Mapping[str, Tensor]:
        """Run the prefix, and the suffix in the bucket that the prefix asks for."""
        if step.dim in dims:
            raise UsageError(f"the step '{name}' computes '{step.dim}': leave it out of `dims`.")
        first, second = (self._input_shapes(phase).keys() for phase in (step.prefix, step.suffix))
        for key in inputs:
            if key not in (known := first | second):
                raise UnknownName("input", key, sorted(known))
        sizes = self._dims_of([step.prefix, step.suffix], inputs, dims)
        self._all_buckets(step, sizes)
        found = self._step(step.prefix, {key: inputs[key] for key in inputs.keys() & first}, sizes)
        bucket = step.bucket(int(found[step.count].item()), self._sizes_of(step, sizes))
        given = {key: inputs[key] for key in inputs.keys() & second}
        return self._step(step.suffix, given, {**sizes, step.dim: bucket})

    def _step(self, step: str, inputs: Mapping[str, Tensor], dims: Mapping[str, int]) -> Mapping[str, Tensor]:
        """Run one plan. What it lacks is found before anything changes."""
        plan = self._fitting(step, dims)
        held = self._engine.held
        held.require(step, plan)
        _require_inputs(step, {b.name: b for b in plan.records.buffers if b.kind == "input"}, inputs)
        held.begin(plan)
        executor = self._engine.bind(plan, self._places, key=self._key(step, dims))
        for pool, size in plan.records.held_states.items():
            if new := size - held[pool]:
                self.workspace.view(pool, held[pool], (new,), "uint8").zero_()
        for name, view in executor.inputs.items():
            view.copy_(inputs[name])
        executor.run()
        held.done(plan)
        return executor.outputs

    # --- dims -----------------------------------------------------------------------------------------------------

    def _input_shapes(self, step: str) -> dict[str, Sequence[Any]]:
        return {b.name: b.shape for b in self._planner.graph(step).buffers if b.kind == "input"}

    def _dims_of(self, phases: Sequence[str], inputs: Mapping[str, Tensor], dims: Dims) -> dict[str, int]:
        """The dims of a step: of the call, of the axes of its inputs, and of the program."""
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
                if not isinstance(dim, int) and dim.name and self._planner.graph(step).dims[dim.name].value is None:
                    yield name, dim.name, size

    # --- looking and leaving --------------------------------------------------------------------------------------

    @property
    def current(self) -> Plan:
        """The plan of the last step."""
        return self._engine.current

    def weights(self) -> Mapping[str, Tensor]:
        """Return views of all weights by the names of their buffers; streamed ones are in host memory."""
        with self._engine.turn():
            return MappingProxyType(self._weights)

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


def _require_inputs(step: str, known: Mapping[str, PlanBuffer], given: Mapping[str, Tensor]) -> None:
    """Make sure that the inputs given are those of a step, in its shapes and dtypes."""
    for name in given:
        if name not in known:
            raise UnknownName("input", name, known)
    absent = [name for name in known if name not in given]
    if absent:
        raise UsageError(f"the step '{step}' needs the input{'s' if len(absent) > 1 else ''} {', '.join(absent)}.")
    for name, record in known.items():
        expected = f"{record.dtype} {list(record.shape)}"
        got = f"{str(given[name].dtype).removeprefix('torch.')} {list(given[name].shape)}"
        if got != expected:
            raise UsageError(f"input '{name}' of '{step}': expected {expected}, got {got}.")
