"""A plan's launches: their shapes, and the average of live bytes, weighted by predicted time.
No torch here.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from mosaic.devices import Device
from mosaic.planner.cost import RateGrids
from mosaic.planner.plan_records import PlanBuffer, PlanOp, PlanRecords
from mosaic.registrar.operator import Spec
from mosaic.registrar.operators import operator

__all__ = ["alive_by_plan", "launch_shapes", "op_seconds", "weight_slots"]


def launch_shapes(records: PlanRecords, op: PlanOp) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an op's operands in one full iteration of the loops around it, by operand."""
    rows = {region.name: region.rows for region in records.regions}
    shapes = {name: list(records.buffers[buffer].shape) for name, buffer in op.operands.items()}
    for operand, axis, region, factor in op.slices:
        shapes[operand][axis] = min(shapes[operand][axis], factor * rows[region])
    return {name: tuple(shape) for name, shape in shapes.items()}


def weight_slots(records: PlanRecords) -> set[int]:
    """Return the buffers into which weights are fetched from the host: weights, not activations."""
    buffers = records.buffers
    return {
        op.operands["y"]
        for op in records.ops
        if operator(op.kernel).implementation("cuda").on_host and _is_host_weight(buffers[op.operands["x"]])
    }


def _is_host_weight(buffer: PlanBuffer) -> bool:
    return buffer.pool == "host" and buffer.tensor is not None


def op_seconds(records: PlanRecords, device: Device) -> list[float]:
    """Return the predicted seconds of every op, all iterations together and each as long as a full one, but for launches.

    Ops of side streams take none: they run beside the others.
    """
    grids, chosen = RateGrids(device), records.implementations
    seconds = []
    for op in records.ops:
        rule = operator(op.kernel)
        way = rule.implementation(device.backend, chosen.get(op.kernel))
        grid = grids.grid(way.rate or rule.rate, way.name)
        work = 0.0
        if op.stream == "main" and grid is not None:
            shapes, named = launch_shapes(records, op), {name.rstrip("?") for name in rule.reads}
            reads = {name: Spec(shapes[name], _dtype(records, op, name)) for name in op.operands if name in named}
            unsaid = {
                name: 1 for name in rule.attrs.split() if "=" not in name
            }  # plans leave out attributes that only costs need
            launch = rule.work(**reads, **{**unsaid, **op.attrs})
            work = op.flops / float(
                grid(np.array([float(launch.rate_rows)]), np.array([float(launch.rate_columns)]))[0]
            )
        seconds.append(max(work, op.bytes / device.bandwidth) if op.stream == "main" else 0.0)
    return seconds


def _dtype(records: PlanRecords, op: PlanOp, operand: str) -> str:
    return str(records.buffers[op.operands[operand]].dtype)


def alive_by_plan(records: PlanRecords, device: Device) -> tuple[int, float]:
    """Return the peak of the activations a plan holds, and their average weighted by the predicted time of every op.

    Activations are all buffers of the workspace except the slots of fetched weights.

    Returns
    -------
    tuple
        Bytes of the largest live set, and the average bytes alive.
    """
    slots, count = weight_slots(records), len(records.ops)
    changes = [0] * (count + 1)
    for buffer in records.buffers:
        if buffer.pool != "workspace" or buffer.alias_of is not None or buffer.id in slots:
            continue
        edges = [buffer.start, *(at for gap in sorted(map(tuple, buffer.gaps)) for at in gap), buffer.end]
        for index, at in enumerate(edges):
            changes[at] += buffer.size if index % 2 == 0 else -buffer.size
    alive = list(accumulate(changes[:count]))
    seconds = op_seconds(records, device)
    return max(alive), sum(size * share for size, share in zip(alive, seconds, strict=True)) / sum(seconds)
