"""Plans for graphs and programs registered by users, in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mosaic.devices import Device
from mosaic.planner.limits import DimsAt
from mosaic.planner.plan import Plan
from mosaic.planner.planner import Planner, Settings
from mosaic.registrar.bucketed import ProgramStep
from mosaic.registrar.program import Program
from mosaic.units import Size, parse_tokens

if TYPE_CHECKING:
    from mosaic.registrar.program import Build, Program


def plan_graph(
    build: Build,
    *,
    dims: Mapping[str, Size],
    name: str = "custom",
    device: Device | str | None = None,
    budget: Size | None = None,
    host_budget: Size | None = None,
    dims_at: DimsAt | None = None,
    solver: str = "auto",
    config: Settings | None = None,
) -> Plan:
    """Plan a graph of your own.

    Parameters
    ----------
    build
        Registers the ops into the given graph; called once per combination of choices.
    dims
        A value for every dim without a fixed one: a number, or like "128k".
    dims_at
        Dims at another context length, to solve the largest context; without it the plan reports its own context.
    budget, host_budget
        The limits on device memory and pinned host memory: bytes, or like "24GiB"; the profile's values by default.
    config
        Take this configuration instead of searching, as in `Planner.plan`.

    Examples
    --------
    >>> def two_layers(g):
    ...     n = g.dim("tokens")
    ...     x = g.input("x", (n, 64), "float32")
    ...     h = g.add_op("linear", x, g.weight("w", (64, 64), "float32"))
    ...     g.add_op("linear", h, g.weight("v", (64, 64), "float32"), out=g.output("y", (n, 64), "float32"))
    >>> plan_graph(two_layers, dims={"tokens": 100}, device="h200").optimal
    True
    """
    program = Program(name)
    program.add_phase(name, build)
    planner = Planner(program, device=device, budget=budget, host_budget=host_budget)
    step = ProgramStep(name=name, sizes=_sizes(planner, name, dims), dims_at=dims_at, takes_all=True)
    return planner.plan(step, solver=solver, config=config)


def plan_program(
    program: Program,
    *,
    dims: Mapping[str, Size],
    device: Device | str | None = None,
    budget: Size | None = None,
    host_budget: Size | None = None,
    solver: str = "auto",
    config: Settings | None = None,
) -> dict[str, Plan]:
    """Plan every phase and joined step of a program; weights, states and carries have the same addresses in all.

    Parameters
    ----------
    dims
        Values for the dims of all phases.
    config
        Take this configuration instead of searching; each step takes the settings that it has.
    """
    planner = Planner(program, device=device, budget=budget, host_budget=host_budget)
    steps = [ProgramStep(name=name, sizes=_sizes(planner, name, dims)) for name in program.steps]
    return {step.name: planner.plan(step, solver=solver, config=config) for step in steps}


def _sizes(planner: Planner, graph: str, dims: Mapping[str, Size]) -> dict[str, int]:
    """The values of a graph's dims."""
    known = {dim.name for dim in planner.space(graph).template.dims}
    return {name: parse_tokens(size, what=f"the dim '{name}'", least=0) for name, size in dims.items() if name in known}
