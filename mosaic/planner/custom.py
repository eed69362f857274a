"""Plans for graphs and programs that users register themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from mosaic.devices import Device, load_device
from mosaic.models.step import MAX_TOKENS
from mosaic.planner.limits import DimsAt, max_context
from mosaic.planner.plan import Plan
from mosaic.planner.planner import plan_point, read_budgets
from mosaic.planner.space import Space
from mosaic.planner.template import compile_template
from mosaic.units import Size, parse_tokens

if TYPE_CHECKING:
    from mosaic.registrar.graph import Graph
    from mosaic.registrar.program import Program

__all__ = ["ProgramPlanner", "plan_graph", "plan_program"]

Settings: TypeAlias = Mapping[str, int | str | None] | None


def plan_graph(
    build: Callable[[Graph], None],
    *,
    dims: Mapping[str, Size],
    name: str = "custom",
    device: Device | str | None = None,
    budget: Size | None = None,
    host_budget: Size | None = None,
    dims_at: DimsAt | None = None,
    solver: str = "auto",
    config: Settings = None,
) -> Plan:
    """Plan a graph of your own.

    Parameters
    ----------
    build
        Registers the ops into the graph it is given; called once per combination of choices.
    dims
        A value for every dim without a fixed one: a number, or like "128k".
    dims_at
        Dims at another context length, to solve the largest context; without it the plan reports the one it was given.
    budget, host_budget
        What may be used of the device, and of pinned host memory: bytes, or like "24GiB"; what the profile says by default.
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
    from mosaic.registrar.graph import Graph  # symbolic: kept out of the start of the command line

    card = load_device(device)

    def register(choices: Mapping[str, str] | None) -> Graph:
        g = Graph(name, backend=card.backend, choices=choices)
        build(g)
        return g

    budgets = read_budgets(card, budget, host_budget)
    return _plan(Space(compile_template(register), card), name, dims, budgets, dims_at, solver, config)


def plan_program(
    program: Program,
    *,
    dims: Mapping[str, Size],
    device: Device | str | None = None,
    budget: Size | None = None,
    host_budget: Size | None = None,
    solver: str = "auto",
    config: Settings = None,
) -> dict[str, Plan]:
    """Plan every phase and joined step of a program; weights, states and carries have the same addresses in all of them.

    Parameters
    ----------
    dims
        Values for the dims of all phases together.
    config
        Take this configuration instead of searching; each step takes the knobs that it has.
    """
    planner = ProgramPlanner(program, device=device, budget=budget, host_budget=host_budget)
    return {step: planner.plan(step, dims, solver=solver, config=config) for step in program.steps}


class ProgramPlanner:
    """Plans the steps of one program on one device; what is compiled is kept.

    Parameters
    ----------
    program
        Its graphs are registered for the backend of the device.
    device, budget, host_budget
        As for `plan_graph`.

    Examples
    --------
    >>> from mosaic.registrar.program import Program
    >>> def double(g):
    ...     n = g.dim("tokens")
    ...     x, w = g.input("x", (n, 64), "float32"), g.weight("w", (64, 64), "float32")
    ...     g.add_op("linear", x, w, out=g.output("y", (n, 64), "float32"))
    >>> program = Program("toy")
    >>> program.add_phase("double", double)
    >>> planner = ProgramPlanner(program, device="cpu")
    >>> [planner.plan("double", {"tokens": tokens}).peak_bytes for tokens in (100, 200)]
    [51200, 102400]
    """

    def __init__(
        self,
        program: Program,
        *,
        device: Device | str | None = None,
        budget: Size | None = None,
        host_budget: Size | None = None,
    ) -> None:
        self.program, self.device = program, load_device(device)
        self.budget_bytes, self.host_budget_bytes = read_budgets(self.device, budget, host_budget)
        self._spaces: dict[str, Space] = {}
        self._graphs: dict[str, Graph] = {}

    def graph(self, step: str) -> Graph:
        """Return the graph of a phase or joined step, in the first option of every choice."""
        if step not in self._graphs:
            self._graphs[step] = self.program.graph(step, backend=self.device.backend)
        return self._graphs[step]

    def plan(self, step: str, dims: Mapping[str, Size], *, solver: str = "auto", config: Settings = None) -> Plan:
        """Plan a phase or joined step; of the dims and the configuration it takes those that it has."""
        if step not in self._spaces:
            register = partial(self.program.graph, step, backend=self.device.backend)
            self._spaces[step] = Space(compile_template(register), self.device)
        space = self._spaces[step]
        settings = None if config is None else space.known(config)
        budgets = self.budget_bytes, self.host_budget_bytes
        return _plan(space, self.program.name, dims, budgets, None, solver, settings)


def _plan(
    space: Space, name: str, dims: Mapping[str, Size], budgets: tuple[int, int], dims_at: DimsAt | None, solver: str,
    settings: Settings,
) -> Plan:  # fmt: skip
    known = {dim.name for dim in space.template.dims}
    point = space.at(
        {key: parse_tokens(value, what=f"the dim '{key}'", least=0) for key, value in dims.items() if key in known}
    )
    config = None if settings is None else point.config(settings)
    longest = None
    if dims_at is not None:
        longest = max_context(space, dims_at, budgets[0], limit=MAX_TOKENS, host_budget_bytes=budgets[1], solver=solver)
    return plan_point(point, *budgets, identity={"model": name}, longest=longest, solver=solver, config=config)
