"""Examine a program: plan it in several ways, check each plan, execute it under poison, compare with naive code."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import torch
from stream_log import CALLER, StreamLog, annotate, execute, races
from torch import Tensor

from mosaic.devices import Device, load_device
from mosaic.errors import MosaicError
from mosaic.planner.check import check_plan
from mosaic.planner.limits import smallest_total
from mosaic.planner.plan import Plan
from mosaic.planner.planner import plan_point
from mosaic.planner.space import Config, Point, Space
from mosaic.planner.template import compile_template
from mosaic.runtime.executor import Executor
from mosaic.runtime.weights import weight_views
from mosaic.runtime.workspace import Workspace

from .building import register
from .findings import Finding, Tally, require
from .language import Call, Choose, Program, declarations, walk
from .naive import Naive
from .values import doubled, values_of

__all__ = ["SOLVERS", "Way", "examine"]

SOLVERS: Final = (
    "auto", "first_fit", "best_fit", "greedy_by_size", "greedy_by_area", "greedy_by_conflicts", "skyline", "periodic",
    "local_search", "exact",
)  # fmt: skip
IDENTITY: Final = {"model": "fuzz", "dtype": "float64"}
BOUNDS: Final = {"float64": 1e-6, "float32": 2e-3}
"""Tolerance by a result's scale. Rotary angles and statistics are float32 by definition."""


class Way(NamedTuple):
    """How to plan: a solver, a configuration or None to search, and the budgets of device and host."""

    solver: str
    config: Config | None
    budget: int
    host_budget: int


def examine(program: Program, seed: int, workspace: Workspace, tally: Tally, ways: Sequence[Way] | None = None) -> None:
    """Plan, check, execute and compare one program in several ways.

    Raises
    ------
    Finding
        If anything is not as it must be.
    """
    rng = random.Random(f"ways/{seed}")
    point = _point(program, _device(rng))
    tally.add("ordered programs" if program.ordered else "free programs")
    given = values_of(program, seed)
    loaded: Plan | None = None
    for way in ways or list(_ways(point, rng)):
        try:
            plan = plan_point(
                point, way.budget, way.host_budget, identity=IDENTITY, solver=way.solver, config=way.config
            )
            _claims(point, plan, way)
            tally.add("plans", f"solver {way.solver}", "searched" if way.config is None else "configured")
            loaded = _load(plan, loaded, given, workspace)
            _execute(program, plan, seed, given, workspace, tally)
        except Finding as finding:
            raise Finding(finding.kind, f"{finding.details}\nway: {way}") from None
        except (MosaicError, IndexError, KeyError, RuntimeError, TypeError, ValueError, AssertionError) as error:
            raise Finding(f"{type(error).__name__}", f"{error}\nway: {way}") from error


def _device(rng: random.Random) -> Device:
    """A CPU whose rates favour now this, now that configuration."""
    return replace(
        load_device("cpu"), name="fuzz", page_bytes=rng.choice([512, 4096, 65536]), launch_s=rng.choice([0.0, 1e-7, 1e-5]),
        bandwidth=10.0 ** rng.uniform(7, 11), host_link=10.0 ** rng.uniform(7, 11), host_bytes=1 << 30,
        gemm_rates={1: 10.0 ** rng.uniform(8, 11), 16: 10.0 ** rng.uniform(8, 11)},
    )  # fmt: skip


def _point(program: Program, device: Device) -> Point:
    space = Space(compile_template(register(program)), device)
    return space.at({name: dim.value for name, dim in program.dims.items() if not dim.fixed})


def _ways(point: Point, rng: random.Random) -> Iterator[Way]:
    """Searches under budgets from the smallest that works, and configurations at random, by solvers at random."""
    host = 1 << 30
    least, _ = smallest_total(point, host)
    roomy = max(point.total_bytes(config) for config in _some(point, rng, 3))
    for budget in (least, rng.randint(least, max(least, roomy)), least - 1):
        yield Way(rng.choice(SOLVERS), None, max(1, budget), host)
    for config in _some(point, rng, 3):
        yield Way(rng.choice(SOLVERS), config, roomy, host)


def _some(point: Point, rng: random.Random, count: int) -> Iterator[Config]:
    """Random configurations; rows are any multiples of the tile."""
    for _ in range(count):
        choices = rng.choice(point.choice_combinations)
        rows = [rng.choice(point.options(choices, k)) for k in range(len(point.space.template.knobs))]
        for k, knob in enumerate(point.space.template.knobs):
            most = (point.extents[knob.name] - 1) // knob.tile
            if rows[k] is not None and most >= 1 and rng.random() < 0.5:
                rows[k] = knob.tile * rng.randint(1, most)
        yield Config(choices, tuple(rows))


def _claims(point: Point, plan: Plan, way: Way) -> None:
    """The checker accepts the plan, and what it says of itself holds."""
    violations = [v for v in check_plan(plan.document) if v.code != "dtype"]  # that is what we said of it
    require(not violations, f"check {violations[0].code if violations else ''}", "\n".join(map(str, violations[:5])))
    require(plan.peak_bytes >= plan.lower_bound_bytes, "peak", f"{plan.peak_bytes} below {plan.lower_bound_bytes}")
    held = plan.total_bytes <= way.budget and plan.document["host_bytes"] <= way.host_budget
    require(plan.fits is held, "fits", f"{plan.total_bytes} of {way.budget}, said {plan.fits}")
    if way.config is not None:
        names = [c.name for c in point.space.template.choices] + [k.name for k in point.space.template.knobs]
        asked = dict(zip(names, (*way.config.choices, *way.config.rows), strict=True))
        require(plan.config == asked, "configuration", f"asked for {asked}, planned {plan.config}")


# --- running ----------------------------------------------------------------------------------------------------------


def _load(plan: Plan, loaded: Plan | None, given: Mapping[str, Tensor], workspace: Workspace) -> Plan:
    """Write the weights where the first plan has them; later plans with the same weights must find them there."""
    same = loaded is not None and _weights(loaded).keys() == _weights(plan).keys()
    if loaded is not None and same:
        moved = [name for name, place in _weights(plan).items() if _weights(loaded)[name] != place]
        require(not moved, "weights moved", f"{moved} lie elsewhere than under {loaded.config}; this is {plan.config}")
    closed = [pool for pool in workspace.committed_bytes() if pool not in plan.pools]
    for pool, size in {**dict.fromkeys(closed, 0), **plan.pools}.items():
        if pool != "weights" or not same:
            workspace.resize(pool, 0)
        workspace.resize(pool, size)
    for name, view in weight_views(plan.document, workspace).items():
        if not same or name not in _weights(plan):
            view.copy_(given[name])
    return plan


def _weights(plan: Plan) -> dict[str, tuple[int, int]]:
    """Where the weights lie on the device, by name."""
    return {b["name"]: (b["offset"], b["size"]) for b in plan.document["buffers"] if b["kind"] == "weight"}


def _execute(
    program: Program, plan: Plan, seed: int, given: Mapping[str, Tensor], workspace: Workspace, tally: Tally
) -> None:
    """Run the steps under poison, in program order and, with side streams, in an order that events allow."""
    declared = declarations(program.body)
    dtype = next(d.dtype for d in declared.values() if d.dtype.startswith("float"))
    externals = {name: value for name, value in given.items() if declared[name].kind == "external"}
    streamed = any(op["stream"] != "main" for op in plan.document["ops"])
    for log in (None, StreamLog(held=True)) if streamed else (None,):
        states = {name: value for name, value in given.items() if declared[name].kind == "state"}
        executor = Executor(plan, workspace, debug="poison", tensors=externals, streams=log)
        for name, value in states.items():
            if name in _names(plan):
                executor.buffer(name).copy_(value)
        for step in range(program.steps):
            inputs = values_of(program, seed + 7919 * step, ("input",))
            _run(executor, inputs, log, seed)
            expected, after = _expected(program, plan, {**given, **states, **inputs})
            states |= {name: after[name] for name in states if name in after}
            for name, view in _results(executor, states):
                _compare(name, view, expected[name], BOUNDS[dtype], f"step {step}{' with streams' if log else ''}")
            tally.add("steps with streams" if log else "steps")
    tally.update({f"op {s.kernel}": 1 for s in walk(program.body) if isinstance(s, Call)})
    tally.add("gaps" if any(b["gaps"] for b in plan.document["buffers"]) else "no gaps")
    tally.update(
        {
            "aliases": sum(b["alias_of"] is not None for b in plan.document["buffers"]),
            "loops": sum(r["count"] > 1 for r in plan.document["regions"]),
            "nested loops": sum(r["parent"] is not None for r in plan.document["regions"]),
            "choices": sum(isinstance(s, Choose) for s in program.body),
        }
    )


def _names(plan: Plan) -> set[str]:
    return {b["name"] for b in plan.document["buffers"]}


def _run(executor: Executor, inputs: Mapping[str, Tensor], log: StreamLog | None, seed: int) -> None:
    if log is None:
        for name, view in executor.inputs.items():
            view.copy_(inputs[name])
        executor.run()
        return
    log.entries.clear()
    for name, view in executor.inputs.items():
        value = inputs[name]
        log.launch(CALLER, torch.add, {"input": value, "other": 0, "out": view})
    executor.run()
    annotate(log, executor)
    found = races(log.entries)
    require(not found, "race", f"{found[:3]}")
    execute(log.entries, random.Random(seed).choice(["sides first", "sides last", "random"]), seed)


def _expected(program: Program, plan: Plan, given: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The results of naive code: the values of all buffers outside of loops, and of states, in their dtypes."""
    rows = {name: value for name, value in plan.config.items() if not isinstance(value, str)}
    choices = {name: value for name, value in plan.config.items() if isinstance(value, str)}
    naive = Naive(program, choices, rows, doubled(given)).run()  # type: ignore[arg-type]
    if not program.ordered:
        once = Naive(program, choices, {}, doubled(given)).run()
        for name, value in naive.items():
            if declarations(program.body).get(name, None) is not None and declarations(program.body)[name].kind in (
                "output",
                "state",
            ):
                _compare(name, value, once[name], 1e-9, "naive code by slices and as a whole: the fuzzer is wrong")
    return naive, {name: value.to(given[name].dtype) for name, value in naive.items() if name in given}


def _results(executor: Executor, states: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield from executor.outputs.items()
    names = {b["name"] for b in executor.document["buffers"]}
    for name in states:
        if name in names:
            yield name, executor.buffer(name)


def _compare(name: str, got: Tensor, expected: Tensor, bound: float, where: str) -> None:
    if not got.is_floating_point():
        require(
            torch.equal(got, expected), "wrong result", f"{name}, {where}: {got.tolist()}, expected {expected.tolist()}"
        )
        return
    got, expected = got.double(), expected.double()
    require(
        torch.equal(got.isnan(), expected.isnan()),
        "wrong result",
        f"{name}, {where}: NaN where there is none, or none where there is",
    )
    scale = float(expected.nan_to_num().abs().max()) if expected.numel() else 0.0
    error = float((got - expected).nan_to_num().abs().max()) if expected.numel() else 0.0
    require(error <= bound * max(scale, 1.0), "wrong result", f"{name}, {where}: off by {error:.3g} of {scale:.3g}")
