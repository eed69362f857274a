"""Assemble the plan document `mosaic.plan/1` from a solved configuration.

Everything the checker needs to verify every claim, and everything the executor
needs to run, is in it: plain integers and strings, in a fixed order.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mosaic.planner.cost import op_totals
from mosaic.planner.lifetimes import BarrierRecord
from mosaic.planner.peaks import ALIGNMENT, formula_text
from mosaic.planner.search import SearchResult
from mosaic.planner.space import Config, Point, Variant
from mosaic.planner.template import BufferRecord
from mosaic.units import round_up

__all__ = ["SCHEMA", "assemble"]

SCHEMA: Final = "mosaic.plan/1"


def assemble(
    point: Point,
    result: SearchResult,
    offsets: Sequence[int],
    peak_bytes: int,
    *,
    identity: Mapping[str, Any],
    budget_bytes: int,
    host_budget_bytes: int,
    max_ctx_tokens: int,
    solver: str,
) -> dict[str, Any]:
    """Build the document.

    Parameters
    ----------
    offsets
        Address of every workspace root, in the order of the variant's `formula.roots`.
    identity
        `mosaic_version`, `model` and `dtype`.
    """
    config = result.config
    variant = point.space.variant(config)
    device = point.space.device
    values = point.values(config)
    polynomials = point.polynomials(config).tolist()
    lower_bound = point.lower_bound(config)
    pages = device.page_bytes
    components = {
        "context": device.context_bytes,
        "library": device.library_bytes,
        "weights": round_up(point.pool_bytes(config, "weights"), pages),
        "state": round_up(point.pool_bytes(config, "state"), pages),
        "workspace": round_up(peak_bytes, pages),
    }
    total = sum(components.values())
    host = point.host_bytes(config.choices)
    on_device = "cpu" if device.backend == "cpu" else "cuda:0"
    return {
        "schema": SCHEMA,
        "mosaic_version": identity["mosaic_version"],
        "model": identity["model"],
        "phase": point.space.template.name,
        "dtype": identity["dtype"],
        "dims": dict(point.dims),
        "device": device.name,
        "backend": device.backend,
        "estimated": device.estimated,
        "device_memory_bytes": device.memory_bytes,
        "page_bytes": pages,
        "mesh": {"size": 1, "axes": {"tensor": 1}},
        "pools": [
            {"name": name, "device": on_device, "capacity": components[name]}
            for name in ("workspace", "weights", "state")
        ]
        + [{"name": "host", "device": "cpu", "capacity": host}],
        "implementations": _implementations(point, config),
        "budget_bytes": budget_bytes,
        "host_budget_bytes": host_budget_bytes,
        "fits": total <= budget_bytes and host <= host_budget_bytes,
        "config": describe(point, config),
        "components": components,
        "total_bytes": total,
        "host_bytes": host,
        "peak_bytes": peak_bytes,
        "lower_bound_bytes": lower_bound,
        "optimal": peak_bytes == lower_bound,
        "solver": solver,
        "max_ctx_tokens": max_ctx_tokens,
        "predicted_step_ms": round(result.seconds * 1e3, 6),
        "formula": formula(point, config),
        "trace": [_trace_step(point, step) for step in result.trace],
        "regions": _regions(point, variant, config),
        "barriers": [_barrier(barrier) for barrier in variant.life.barriers],
        "edges": [{"kind": kind, "from": source, "to": target} for kind, source, target in variant.body.edges],
        "ops": _ops(point, variant, values),
        "buffers": _buffers(variant, polynomials, point.root_sizes(config).tolist(), offsets),
    }


def _implementations(point: Point, config: Config) -> dict[str, str]:
    """The implementation of each operator that has several."""
    chosen = point.space.times(config.choices).attention_implementation(point.dims.get("seqs", 0))
    return {} if chosen is None else {"attention": chosen}


def describe(point: Point, config: Config) -> dict[str, int | str | None]:
    """The configuration as knob -> rows (None: off), choice -> option."""
    template = point.space.template
    named: dict[str, int | str | None] = {
        choice.name: value for choice, value in zip(template.choices, config.choices, strict=True)
    }
    named.update({knob.name: rows for knob, rows in zip(template.knobs, config.rows, strict=True)})
    return named


def formula(point: Point, config: Config) -> list[dict[str, str]]:
    """The peak formula of the configuration's variant, symbolic in dims and rows per chunk."""
    template, variant = point.space.template, point.space.variant(config)
    if variant.formula_lines:
        return variant.formula_lines
    rows = {knob.name: value for knob, value in zip(template.knobs, config.rows, strict=True)}
    off = {f"{knob.name}_rows": knob.over for knob in template.knobs if rows[knob.name] is None}
    order = [(dim.name, dim.at_most) for dim in template.dims if dim.at_most is not None]
    order += [(f"{knob.name}_rows", knob.over) for knob in template.knobs if rows[knob.name] is not None]
    fixed = {dim.name: dim.value for dim in template.dims if dim.value is not None}
    forms = formula_text(variant.body, variant.formula, off, order, fixed)
    variant.formula_lines = [{"expr": expr, "at": variant.body.ops[at].name} for expr, at in forms]
    return variant.formula_lines


def _trace_step(point: Point, step: Any) -> dict[str, Any]:
    return {
        "config": describe(point, step.config),
        "move": step.move,
        "bottleneck": point.space.variant(step.config).body.ops[step.at].name,
        "peak_bytes": step.peak_bytes,
        "total_bytes": step.total_bytes,
        "predicted_ms": round(step.seconds * 1e3, 6),
    }


def _regions(point: Point, variant: Variant, config: Config) -> list[dict[str, Any]]:
    rows = {
        knob.name: value
        for knob, value in zip(point.space.template.knobs, config.rows, strict=True)
        if value is not None
    }
    found = []
    for index in variant.life.regions:
        region = variant.body.regions[index]
        extent, parent = point.dims[region.dim], _active_parent(variant, region.parent)
        found.append(
            {
                "name": region.name, "knob": region.knob, "dim": region.dim, "extent": extent, "rows": rows[region.knob],
                "count": -(-extent // rows[region.knob]), "start": region.start, "end": region.end, "parent": parent,
            }
        )  # fmt: skip
    return found


def _active_parent(variant: Variant, region: int | None) -> str | None:
    while region is not None and region not in variant.life.regions:
        region = variant.body.regions[region].parent
    return None if region is None else variant.body.regions[region].name


def _barrier(barrier: BarrierRecord) -> dict[str, Any]:
    return {
        "name": barrier.name, "region": barrier.name if barrier.region is not None else None, "start": barrier.start,
        "end": barrier.end, "inputs": barrier.inputs, "outputs": barrier.outputs, "carried": barrier.carried,
    }  # fmt: skip


def _ops(point: Point, variant: Variant, values: Sequence[int]) -> list[dict[str, Any]]:
    totals = op_totals(variant.body, values, point.extents)
    statics = _op_statics(variant)
    return [{**static, "flops": flops, "bytes": moved} for static, (flops, moved) in zip(statics, totals, strict=True)]


def _op_statics(variant: Variant) -> list[dict[str, Any]]:
    """The part of every op that dims do not change."""
    if not variant.op_statics:
        on = {variant.body.regions[i].name for i in variant.life.regions}
        variant.op_statics = [
            {
                "index": index, "name": op.name, "kernel": op.kernel, "stream": op.stream,
                "region": _active_parent(variant, op.region), "reads": op.reads, "writes": op.writes,
                "operands": op.operands, "attrs": op.attrs, "inplace": op.inplace,
                "slices": [s for s in op.slices if s[2] in on],
            }
            for index, op in enumerate(variant.body.ops)
        ]  # fmt: skip
    return variant.op_statics


def _buffers(
    variant: Variant, polynomials: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]
) -> list[dict[str, Any]]:
    place = dict(zip(variant.formula.roots.tolist(), zip(map(int, offsets), sizes, strict=True), strict=True))
    tops: Counter[str] = Counter()
    for b in _outside_order(variant):
        record = variant.body.buffers[b]
        size = _size(record, polynomials)
        place[b] = tops[record.pool], size
        tops[record.pool] += size
    found: list[dict[str, Any]] = []
    for b, (record, static) in enumerate(zip(variant.body.buffers, _buffer_statics(variant), strict=True)):
        at = 0
        if record.alias_of is None:
            offset, size = place[b]
        else:
            size, at = _size(record, polynomials), polynomials[record.alias_offset]
            offset = place[record.alias_of][0] + at
        shape = [polynomials[row] for row in record.shape]
        found.append({**static, "offset": offset, "size": size, "alias_offset": at, "shape": shape})
    return found


def _outside_order(variant: Variant) -> list[int]:
    """The buffers that no solver places, in the order in which they lie in their pools.

    Weights come first, by name and not as they were registered, which choices and phases change: a weight has one address
    wherever the same weights are in its pool. Host memory holds them before the hidden states for the same reason.
    """
    if not variant.outside_order:
        roots = set(variant.formula.roots.tolist())
        outside = [b for b, x in enumerate(variant.body.buffers) if b not in roots and x.alias_of is None]
        variant.outside_order = sorted(outside, key=lambda b: _rank(variant.body.buffers[b]))
    return variant.outside_order


def _rank(record: BufferRecord) -> tuple[bool, list[str | int]]:
    """What buffers of a pool are sorted by: weights by name, layer 2 before layer 10, then the rest as it comes."""
    name = record.tensor or (record.name if record.kind == "weight" else "")
    return not name, [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name)]


def _size(record: BufferRecord, polynomials: Sequence[int]) -> int:
    """Bytes of all slots of a buffer."""
    return round_up(polynomials[record.bytes], ALIGNMENT) * record.rotate


def _buffer_statics(variant: Variant) -> list[dict[str, Any]]:
    """The part of every buffer that dims do not change."""
    if not variant.buffer_statics:
        body, life = variant.body, variant.life
        variant.buffer_statics = [
            {
                "id": b, "name": record.name, "kind": record.kind, "pool": record.pool, "start": life.starts[b],
                "end": life.ends[b], "gaps": [list(gap) for gap in life.gaps[b]], "alias_of": record.alias_of,
                "dtype": record.dtype, "alignment": ALIGNMENT,
                "region": body.regions[home].name if (home := life.homes[b]) is not None else None,
                "tensor": record.tensor, "rotate": record.rotate,
            }
            for b, record in enumerate(body.buffers)
        ]  # fmt: skip
    return variant.buffer_statics
