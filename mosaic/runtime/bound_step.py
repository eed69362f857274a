"""A step at one size, bound: its plan, its executor, its inputs, and the carries that it takes and leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from mosaic.errors import UnknownName, UsageError
from mosaic.planner.plan_records import PlanRecords
from mosaic.runtime.executor import Executor

if TYPE_CHECKING:
    from mosaic.planner.plan import Plan

__all__ = ["BoundStep", "carried_bytes", "fill_inputs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundStep:
    """A step at one size: its plan and executor, and bytes of the carries that it needs a value in, and that it leaves."""

    plan: Plan
    executor: Executor
    taken: Mapping[str, int]
    left: Mapping[str, int]


def fill_inputs(step: str, views: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Write the inputs of a step."""
    for name in given:
        if name not in views:
            raise UnknownName("input", name, views)
    absent = [name for name in views if name not in given]
    if absent:
        raise UsageError(f"the step '{step}' needs the input{'s' if len(absent) > 1 else ''} {', '.join(absent)}.")
    for name, view in views.items():
        if given[name].shape != view.shape or given[name].dtype != view.dtype:
            expected, got = (f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (view, given[name]))
            raise UsageError(f"input '{name}' of '{step}': expected {expected}, got {got}.")
    for name, view in views.items():
        view.copy_(given[name])


def carried_bytes(records: PlanRecords) -> dict[str, dict[str, int]]:
    """Return the bytes of the carries that a plan reads before it writes them, and of all that hold a value after it."""
    carries = {b.id: b for b in records.buffers if b.kind == "carry"}
    touched: set[int] = set()
    taken: dict[str, int] = {}
    for op in records.ops:
        taken |= {carries[b].name: carries[b].value_bytes for b in op.reads if b in carries and b not in touched}
        touched |= {*op.reads, *op.writes}
    return {"taken": taken, "left": {b.name: b.value_bytes for b in carries.values()}}
