"""Plan a step of a model or a program: search, place, assemble.

`plan` is the one-call form. A `Planner` keeps compiled templates, so that further requests take milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

from mosaic.devices import Device, load_device
from mosaic.errors import UnsafePlan, UsageError
from mosaic.models import Model, load
from mosaic.models.architecture import Architecture
from mosaic.models.phase import FULL_STEP, Phase
from mosaic.models.safetensors import Layout
from mosaic.models.step import MAX_TOKENS, StepSize
from mosaic.planner.check import prove_safe
from mosaic.planner.document import Draft, assemble
from mosaic.planner.limits import MemoryBytes, holds, is_feasible, least, max_context, search_and_place, smallest_total
from mosaic.planner.placement import place
from mosaic.planner.plan import Plan
from mosaic.planner.request import DEFAULT_MASK_RATIO, Request
from mosaic.planner.search import SearchResult, lowest
from mosaic.planner.space import Config, Point, Space
from mosaic.planner.template import collector_paused, compile_template, template_of
from mosaic.registrar.bucketed import ProgramStep
from mosaic.registrar.program import Program
from mosaic.units import Size, parse_bytes
from mosaic.version import __version__

SizedStep: TypeAlias = StepSize | ProgramStep
"""A step in numbers, of a model or of a program."""
Step: TypeAlias = Request | SizedStep
"""A step to plan: a user's request for a model, or sizes."""

Settings: TypeAlias = Mapping[str, int | str | None]
"""A configuration: rows per chunk by knob (None: off), an option by choice."""
KEPT_CONFIGS: Final = 4
"""Configurations per kind of step that `Planner.fits` tries before it searches."""


class Planner:
    """Plans steps of one model, or of one program, on one device.

    Parameters
    ----------
    model
        A `Model`, a preset's name, a checkpoint directory, or a `Program`, whose graphs are registered for the device's backend.
    device
        A `Device` or its name; the built-in rtx-4090 if not given.
    budget
        The most device memory for the process, in bytes or like "24GiB"; the device's whole memory by default.
    host_budget
        The most pinned host memory for weights and hidden states, 0 for none; the profile's value by default.
    pinned
        Choices that are fixed, such as {"stream": "all"}.
    batch_invariant
        Plan steps in which a request's results are bit for bit independent of the other requests of its step.

    Examples
    --------
    >>> planner = Planner("llada-8b", device="rtx-3090")
    >>> planner.plan(Request(seq_lens=(32768,))).fits
    True

    Attributes
    ----------
    model, program
        The one that is planned; the other is None or missing.
    """

    model: Model
    program: Program | None

    def __init__(
        self,
        model: Model | str | Path | Program,
        *,
        device: Device | str | None = None,
        budget: Size | None = None,
        host_budget: Size | None = None,
        pinned: Mapping[str, str] | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self.program = model if isinstance(model, Program) else None
        self.architecture: Architecture | None = None
        if self.program is None:
            self.model = model if isinstance(model, Model) else load(model)  # type: ignore[arg-type]
            self.architecture = self.model.architecture
            self._identity = {"model": self.model.name, "dtype": self.architecture.dtype}
        else:
            self._identity = {"model": self.program.name}
        self.device = load_device(device)
        self.budget_bytes, self.host_budget_bytes = _read_budgets(self.device, budget, host_budget)
        self.pinned, self.batch_invariant = dict(pinned or {}), batch_invariant
        self._spaces: dict[Phase | str, Space] = {}
        self._longest: dict[tuple[Any, ...], int] = {}
        self._fitting: dict[Phase | str, tuple[Config, ...]] = {}

    def with_pinned(self, pinned: Mapping[str, str]) -> Planner:
        """Return the same planner with more choices pinned; compiled templates are shared."""
        other = copy(self)
        other.pinned = {**self.pinned, **pinned}
        return other

    def with_budgets(self, *, budget: Size | None = None, host_budget: Size | None = None) -> Planner:
        """Return the same planner with other budgets, of the device or of the host; compiled templates are shared."""
        other = copy(self)
        other.budget_bytes, other.host_budget_bytes = _read_budgets(
            self.device,
            self.budget_bytes if budget is None else budget,
            self.host_budget_bytes if host_budget is None else host_budget,
        )
        return other

    def with_device(self, device: Device) -> Planner:
        """Return a planner for another device and all of its memory; compiled templates are shared."""
        other = copy(self)
        other.device, other.budget_bytes = device, device.memory_bytes
        alike = device.backend == self.device.backend
        other._spaces = {kind: space.on(device) for kind, space in self._spaces.items()} if alike else {}
        other._longest, other._fitting = {}, {}
        return other

    def space(self, kind: Phase | str = FULL_STEP) -> Space:
        """Return the configurations of one kind of step: a model's phase, or a phase or joined step of a program."""
        if kind not in self._spaces:
            backend = self.device.backend
            if isinstance(kind, Phase):
                template = template_of(self.model, backend=backend, phase=kind)
            else:
                assert self.program is not None
                template = compile_template(partial(self.program.graph, kind, backend=backend))
            self._spaces[kind] = Space(template, self.device, batch_invariant=self.batch_invariant)
        return self._spaces[kind]

    def at(self, step: Step) -> Point:
        """Return the space at a step's dims."""
        size = _size(step)
        return self.space(size.kind).at(size.dims(self.architecture), pinned=self.pinned)

    def verify_checkpoint(self) -> None:
        """Make sure that the model's directory, if it has weights, holds every tensor in its shape, by headers alone.

        Raises
        ------
        CheckpointError
            Naming file, tensor, and the expected and actual values.
        """
        if self.program is not None or self.model.path is None or not Layout.exists(self.model.path):
            return
        template = self.space().template
        body = template.first
        values = [dim.value or 1 for dim in template.dims] + [1] * len(template.knobs)
        sizes = body.evaluate(values).tolist()
        weights = [
            (b.tensor, tuple(sizes[row] for row in b.shape))
            for b in body.buffers
            if b.kind == "weight" and b.tensor is not None
        ]
        Layout(self.model.path).verify(weights, self.model.architecture)

    @collector_paused()
    def plan(self, step: Step, *, solver: str = "auto", config: Settings | None = None, limit: bool = True) -> Plan:
        """Plan one step. A plan that does not fit is no error: its `fits` is False.

        A cut step has a plan for each of its graphs: this is the one with the most memory, `plans` gives all.

        Parameters
        ----------
        config
            Take this configuration instead of searching: rows per chunk by knob, an option by choice. A knob that is
            not named is off, a choice takes its first option. For ablations and tests; the search finds better ones.
        limit
            Solve the largest context as well; otherwise `max_ctx_tokens` is this step's, if it fits.
        """
        found = self.plans(step, solver=solver, config=config, limit=limit)
        return max(found, key=lambda plan: plan.total_bytes)

    def plans(
        self, step: Step, *, solver: str = "auto", config: Settings | None = None, limit: bool = True
    ) -> list[Plan]:
        """Plan the graphs of one step, as `plan` does: one, or for a cut step its first graph, and its second for each
        row count. Each graph takes the settings of `config` that it has; a single graph must have all of them."""
        graphs, found = _graphs(step), list[Plan]()
        scales = not isinstance(step, ProgramStep) or step.dims_at is not None  # it is known at other contexts, too
        longest = self.max_context(step, solver=solver) if limit and scales else None
        for graph in graphs:
            point = self.at(graph)
            settings = config if config is None or _size(graph).takes_all else point.space.known(config)
            plan = plan_point(
                point, self.budget_bytes, self.host_budget_bytes, identity=self._identity, longest=longest, solver=solver,
                config=None if settings is None else point.config(settings),
            )  # fmt: skip
            found.append(plan)
        return found

    @collector_paused()
    def max_context(self, step: Step, *, solver: str = "auto") -> int:
        """Return the largest context for steps like this one, in tokens; 0 if not even one token fits.

        Cached for all steps that differ in their context alone.
        """
        graphs = _graphs(step)
        if len(graphs) > 1:
            return min(self.max_context(graph, solver=solver) for graph in graphs)
        size = _size(step)

        def found() -> int:
            return max_context(
                self.space(size.kind), lambda context: step.at(context).dims(self.architecture), self.budget_bytes,
                limit=MAX_TOKENS, host_budget_bytes=self.host_budget_bytes, pinned=self.pinned, solver=solver,
            )  # fmt: skip

        if isinstance(size, ProgramStep):
            return found()
        share = step.mask_ratio if isinstance(step, Request) and step.masked is None else None
        window = max(size.windows) if size.phase.cached else None
        rows = 0 if share is not None else size.rows
        kind = (solver, size.kind, share, rows, size.logit_rows, size.kept, window, frozenset(size.others.items()))
        sized = step.sized if isinstance(step, Request) else None
        key = (*kind, sized, self.budget_bytes, self.host_budget_bytes, *self.pinned.items())
        if key not in self._longest:
            self._longest[key] = found()
        return self._longest[key]

    @collector_paused()
    def fits(self, step: Step, *, config: Settings | None = None) -> bool:
        """Return whether `plan` finds one that fits; under a millisecond if the answer for such a step was yes before.

        Configurations of earlier steps of the kind are tried first, with their known orders replayed: any packing
        within the budget decides.

        Parameters
        ----------
        config
            As for `plan`.
        """
        graphs = _graphs(step)
        if len(graphs) > 1:
            return all(self.fits(graph, config=config) for graph in graphs)
        point, kind = self.at(step), _size(step).kind
        known = self._fitting.get(kind, ())
        budgets = self.budget
        if config is not None:
            chosen = point.config(config)
            return (
                point.fits(chosen, *budgets)
                and point.total_bytes(chosen, place(point, chosen).peak_bytes) <= self.budget_bytes
            )
        if any(holds(point, config, *budgets) for config in known):
            return True
        if not is_feasible(point, *budgets):
            return False
        found = lowest(point, self.host_budget_bytes)
        self._fitting[kind] = (found, *(config for config in known if config != found))[:KEPT_CONFIGS]
        return True

    @collector_paused()
    def needed(self, step: Step) -> int:
        """Return the bytes of the smallest budget that holds the step."""
        return max(smallest_total(self.at(graph), self.host_budget_bytes)[0] for graph in _graphs(step))

    @property
    def budget(self) -> MemoryBytes:
        """The limits on device memory and pinned host memory."""
        return MemoryBytes(self.budget_bytes, self.host_budget_bytes)

    @collector_paused()
    def least(self, step: Step, *, config: Settings | None = None) -> MemoryBytes:
        """Return the least bytes that a step needs, without a plan; by the peak formula, if that exceeds a budget.

        Parameters
        ----------
        config
            As for `plan`.
        """
        points = [self.at(graph) for graph in _graphs(step)]
        found = [least(point, self.budget, None if config is None else point.config(config)) for point in points]
        return max(found, key=lambda memory: memory.device_bytes)


def _size(step: Step) -> SizedStep:
    return step.size if isinstance(step, Request) else step


def _graphs(step: Step) -> Sequence[Step]:
    """The sizes of the graphs of a step."""
    graphs = _size(step).graphs
    return graphs if len(graphs) > 1 else (step,)


def _read_budgets(device: Device, budget: Size | None, host_budget: Size | None) -> tuple[int, int]:
    """Return the limits on device memory and pinned host memory: as given, or the profile's."""
    return (
        device.memory_bytes if budget is None else parse_bytes(budget, what="budget"),
        device.host_bytes if host_budget is None else parse_bytes(host_budget, what="host_budget", least=0),
    )


def plan_point(
    point: Point,
    budget_bytes: int,
    host_budget_bytes: int = 0,
    *,
    identity: Mapping[str, Any],
    longest: int | None = None,
    solver: str = "auto",
    config: Config | None = None,
) -> Plan:
    """Search, place, assemble and prove at fixed dims.

    Parameters
    ----------
    identity
        The model's name, and the plan's stated dtype; by default that of most weights.
    longest
        The largest context, for `max_ctx_tokens`; without it, the step's own context, or 0.
    config
        A configuration to take instead of searching.

    Raises
    ------
    UnsafePlan
        If the checker refuses the plan, which is not returned.
    """
    if config is None:
        result, (offsets, peak, used) = search_and_place(point, budget_bytes, host_budget_bytes, solver=solver)
    else:
        result = SearchResult(config=config, fits=True, seconds=point.seconds(config), evaluations=0, trace=())
        offsets, peak, used = place(point, config, solver=solver)
    fits = (
        point.total_bytes(result.config, peak) <= budget_bytes
        and point.host_bytes(result.config.choices) <= host_budget_bytes
    )
    context = point.dims.get("keys", point.dims.get("tokens", 0)) if fits else 0
    if longest is None or point.dims.get("seqs") == 1:  # a configuration of one's own may fit where the search's do not
        longest = max(longest or 0, context)
    body = point.space.template.bodies[result.config.choices]
    draft = assemble(
        point, result, offsets, peak, budget_bytes=budget_bytes,
        identity={"mosaic_version": __version__, "dtype": body.dtype, **identity},
        host_budget_bytes=host_budget_bytes, max_ctx_tokens=longest, solver=used,
    )  # fmt: skip
    _require_safe(draft)
    return Plan(draft)


def _require_safe(draft: Draft) -> None:
    """Prove a plan before it is returned; the checker shares no code with the search and the packer."""
    violations = prove_safe(draft.records, draft.header, draft.numbers)
    if violations:
        dims = ", ".join(f"{name}={value:,}" for name, value in draft.header["dims"].items())
        what = f"{draft.header['model']} ({dims})"
        raise UnsafePlan(map(str, violations), what=what, solver=draft.header["solver"])


def plan(
    model: Model | str | Path,
    *,
    tokens: Size | None = None,
    seq_lens: Iterable[Size] | str | None = None,
    masked: Size | None = None,
    mask_ratio: float | None = None,
    device: Device | str | None = None,
    budget: Size | None = None,
    host_budget: Size | None = None,
    batch_invariant: bool = False,
    solver: str = "auto",
) -> Plan:
    """Plan one denoising step to the byte.

    Parameters
    ----------
    model
        A preset's name, a checkpoint directory, a config.json, or a `Model`.
    tokens
        Context of one sequence: a number or like "128k"; or `seq_lens` for a packed batch.
    masked, mask_ratio
        Rows to unembed, as a number or as a share of the tokens (half of them if neither is given).
    device, budget
        Profile by name or object (default: the built-in rtx-4090), and the limit on its memory: bytes, or like "24GiB".
    host_budget
        The most pinned host memory for weights and hidden states; the profile's value by default.
    batch_invariant
        Plan a step in which a sequence's results are bit for bit independent of the others.
    solver
        Offset solver; `auto` is the portfolio.

    Returns
    -------
    Plan
        With `fits` False if the request does not fit.

    Examples
    --------
    >>> plan("llada-8b", tokens="128k", device="rtx-3090", budget="20GiB").fits
    True
    """
    if (tokens is None) == (seq_lens is None):
        raise UsageError("give either tokens (one sequence) or seq_lens (a packed batch).")
    if masked is not None and mask_ratio is not None:
        raise UsageError("give either masked (rows) or mask_ratio (a share of the tokens), not both.")
    ratio = DEFAULT_MASK_RATIO if mask_ratio is None else mask_ratio
    request = Request(seq_lens=(tokens,) if seq_lens is None else seq_lens, masked=masked, mask_ratio=ratio)  # type: ignore[arg-type]
    planner = Planner(model, device=device, budget=budget, host_budget=host_budget, batch_invariant=batch_invariant)
    return planner.plan(request, solver=solver)
