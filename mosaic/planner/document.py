"""Draft a plan from a solved configuration, and write it as the document `mosaic.plan/1`.

A draft is what the checker proves: the variant's rows, which dims do not change, and numbers by columns. The document,
with all that the checker and the executor need as integers and strings in a fixed order, is written from them on first
use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np

from mosaic.planner.body import BufferRecord
from mosaic.planner.check import Numbers, Records
from mosaic.planner.cost import op_totals
from mosaic.planner.lifetimes import BarrierRecord
from mosaic.planner.peaks import ALIGNMENT, formula_text
from mosaic.planner.search import SearchResult
from mosaic.planner.space import Config, Ids, Point, Space, Tables, Variant
from mosaic.registrar.operator import Operator
from mosaic.units import round_up

SCHEMA: Final = "mosaic.plan/1"
_HELD: Final = ("inputs", "outputs", "carried")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A plan before its document is written.

    Parameters
    ----------
    header
        All fields of the document up to the first list of rows.
    records, numbers
        The rows of the document's lists, and their numbers.
    operators
        Operators of its ops that Mosaic does not ship, by name.
    statements
        Gives the remaining statements: formula, trace, and each op's FLOPs and bytes.
    """

    header: Mapping[str, Any]
    records: Records
    numbers: Numbers
    operators: Mapping[str, Operator]
    statements: Callable[[], tuple[list[Any], list[Any], Sequence[tuple[int, int]]]]

    def document(self) -> dict[str, Any]:
        """Write the document; no list in it is shared with another."""
        records, numbers = self.records, self.numbers
        formula, trace, work = self.statements()
        loops = zip(records.regions, numbers.extent, numbers.rows, numbers.num_chunks, strict=True)
        places = zip(records.buffers, *numbers[:4], strict=True)
        return {
            **self.header,
            "formula": formula,
            "trace": trace,
            "regions": [
                {
                    "name": row["name"], "knob": row["knob"], "dim": row["dim"], "extent": extent, "rows": rows,
                    "count": count, "start": row["start"], "end": row["end"], "parent": row["parent"],
                }
                for row, extent, rows, count in loops
            ],
            "barriers": [{**row, **{key: [*row[key]] for key in _HELD}} for row in records.barriers],
            "edges": [{**row} for row in records.edges],
            "ops": [_op(row, *claims) for row, claims in zip(records.ops, work, strict=True)],
            "buffers": [
                {
                    **row, "gaps": [[*gap] for gap in row["gaps"]], "offset": offset, "size": size, "alias_offset": at,
                    "shape": [*shape],
                }
                for row, offset, size, at, shape in places
            ],
        }  # fmt: skip


def _op(row: Mapping[str, Any], flops: int, moved: int) -> dict[str, Any]:
    return {
        **row, "reads": [*row["reads"]], "writes": [*row["writes"]], "operands": {**row["operands"]},
        "attrs": {**row["attrs"]}, "inplace": [[*pair] for pair in row["inplace"]],
        "slices": [[*cut] for cut in row["slices"]], "flops": flops, "bytes": moved,
    }  # fmt: skip


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
) -> Draft:
    """Draft the plan of a configuration.

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
    lower_bound = point.lower_bound(config)
    pages = device.page_bytes
    states = point.state_bytes(config)
    components = {
        "context": device.context_bytes,
        "library": device.library_bytes,
        "weights": round_up(point.pool_bytes(config, "weights"), pages),
        "state": sum(states.values()),
        "workspace": round_up(peak_bytes, pages),
    }
    total = sum(components.values())
    host = point.host_bytes(config.choices)
    on_device = "cpu" if device.backend == "cpu" else "cuda:0"
    header = {
        "schema": SCHEMA,
        "mosaic_version": identity["mosaic_version"],
        "model": identity["model"],
        "phase": point.space.template.name,
        "dtype": identity["dtype"],
        "dims": dict(point.dims),
        "device": device.name,
        "backend": device.backend,
        **({"capability": device.capability} if device.capability else {}),
        "estimated": device.estimated,
        "device_memory_bytes": device.memory_bytes,
        "page_bytes": pages,
        "mesh": {"size": 1, "axes": {"tensor": 1}},
        "declared": {
            "kernels": [*variant.body.operators],
            "streams": [*dict.fromkeys(op.stream for op in variant.body.ops if op.stream != "main")],
        },
        "pools": [
            {"name": name, "device": on_device, "capacity": size}
            for name, size in (*((name, components[name]) for name in ("workspace", "weights")), *states.items())
        ]
        + [{"name": "host", "device": "cpu", "capacity": host}],
        "implementations": dict(point.space.times(config.choices).implementations(point.values(config))),
        "budget_bytes": budget_bytes,
        "host_budget_bytes": host_budget_bytes,
        "fits": total <= budget_bytes and host <= host_budget_bytes,
        "config": describe(point.space, config),
        "components": components,
        "total_bytes": total,
        "host_bytes": host,
        "peak_bytes": peak_bytes,
        "lower_bound_bytes": lower_bound,
        "optimal": peak_bytes == lower_bound,
        "solver": solver,
        "max_ctx_tokens": max_ctx_tokens,
        "predicted_step_ms": round(result.seconds * 1e3, 6),
        **({"batch_invariant": True} if point.space.batch_invariant else {}),
    }
    return Draft(
        header=header, records=records_of(variant), numbers=numbers_of(point, config, offsets),
        operators=variant.body.operators,
        statements=partial(_state, point.space, result, point.values(config), dict(point.extents)),
    )  # fmt: skip


def _state(
    space: Space, result: SearchResult, values: Sequence[int], extents: Mapping[str, int]
) -> tuple[list[Any], list[Any], Sequence[tuple[int, int]]]:
    """Formula, search steps, and each op's FLOPs and bytes."""
    trace = [_trace_step(space, step) for step in result.trace]
    body = space.variant(result.config).body
    return [{**line} for line in formula(space, result.config)], trace, op_totals(body, values, extents)


def describe(space: Space, config: Config) -> dict[str, int | str | None]:
    """Return the configuration as knob -> rows (None: off), choice -> option."""
    template = space.template
    named: dict[str, int | str | None] = {
        choice.name: value for choice, value in zip(template.choices, config.choices, strict=True)
    }
    named.update({knob.name: rows for knob, rows in zip(template.knobs, config.rows, strict=True)})
    return named


def formula(space: Space, config: Config) -> list[dict[str, str]]:
    """Return the peak formula of the configuration's variant, symbolic in dims and rows per chunk."""
    template, variant = space.template, space.variant(config)
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


def _trace_step(space: Space, step: Any) -> dict[str, Any]:
    return {
        "config": describe(space, step.config),
        "move": step.move,
        "bottleneck": space.variant(step.config).body.ops[step.at].name,
        "peak_bytes": step.peak_bytes,
        "total_bytes": step.total_bytes,
        "predicted_ms": round(step.seconds * 1e3, 6),
    }


# -- rows that dims do not change, once a variant, and their numbers --------------------------------------------------


def records_of(variant: Variant) -> Records:
    """Return the rows of a variant's plans without their numbers: one object for all of them."""
    if variant.records is None:
        body = variant.body
        variant.records = Records(
            ops=list(_op_rows(variant)), buffers=list(_buffer_rows(variant)), regions=list(_region_rows(variant)),
            barriers=[_barrier_row(barrier) for barrier in variant.life.barriers],
            edges=[{"kind": kind, "from": source, "to": target} for kind, source, target in body.edges],
        )  # fmt: skip
    return variant.records


def _op_rows(variant: Variant) -> Iterator[Mapping[str, Any]]:
    on = {variant.body.regions[i].name for i in variant.life.regions}
    for index, op in enumerate(variant.body.ops):
        yield {
            "index": index, "name": op.name, "kernel": op.kernel, "stream": op.stream,
            "region": _active_parent(variant, op.region), "reads": op.reads, "writes": op.writes,
            "operands": op.operands, "attrs": op.attrs, "inplace": op.inplace,
            "slices": tuple([s for s in op.slices if s[2] in on]),
        }  # fmt: skip


def _buffer_rows(variant: Variant) -> Iterator[Mapping[str, Any]]:
    body, life = variant.body, variant.life
    for b, record in enumerate(body.buffers):
        yield {
            "id": b, "name": record.name, "kind": record.kind, "pool": record.pool, "start": life.starts[b],
            "end": life.ends[b], "gaps": tuple(life.gaps[b]), "alias_of": record.alias_of,
            "dtype": record.dtype, "alignment": ALIGNMENT,
            "region": body.regions[home].name if (home := life.homes[b]) is not None else None,
            "tensor": record.tensor, "rotate": record.rotate,
        }  # fmt: skip


def _region_rows(variant: Variant) -> Iterator[Mapping[str, Any]]:
    for index in variant.life.regions:
        region = variant.body.regions[index]
        yield {
            "name": region.name, "knob": region.knob, "dim": region.dim, "start": region.start, "end": region.end,
            "parent": _active_parent(variant, region.parent),
        }  # fmt: skip


def _active_parent(variant: Variant, region: int | None) -> str | None:
    while region is not None and region not in variant.life.regions:
        region = variant.body.regions[region].parent
    return None if region is None else variant.body.regions[region].name


def _barrier_row(barrier: BarrierRecord) -> dict[str, Any]:
    """A row, which lists nothing as carried from one iteration to the next: no graph reads what is written later."""
    return {
        "name": barrier.name, "region": barrier.name if barrier.region is not None else None, "start": barrier.start,
        "end": barrier.end, "inputs": barrier.inputs, "outputs": barrier.outputs, "carried": [],
    }  # fmt: skip


def numbers_of(point: Point, config: Config, offsets: Sequence[int]) -> Numbers:
    """Return the numbers of a plan, from its workspace roots' addresses in the order of the variant's `formula.roots`."""
    variant = point.space.variant(config)
    tables = _tables(variant)
    polynomials, roots = point.polynomials(config), variant.formula.roots
    size = (polynomials[tables.bytes] + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT * tables.rotates
    size[roots] = point.root_sizes(config)
    offset = np.zeros_like(size)
    offset[roots] = offsets
    for stack in tables.stacks:
        offset[stack] = np.cumsum(size[stack]) - size[stack]
    alias_offset = np.zeros_like(size)
    alias_offset[tables.aliases] = polynomials[tables.alias_offsets]
    offset[tables.aliases] = offset[tables.alias_roots] + alias_offset[tables.aliases]
    axes = polynomials[tables.shapes].tolist()
    loops = [variant.body.regions[index] for index in variant.life.regions]
    rows = dict(zip((knob.name for knob in point.space.template.knobs), config.rows, strict=True))
    extent, chunk = [point.dims[loop.dim] for loop in loops], [rows[loop.knob] or 0 for loop in loops]
    return Numbers(
        offset=offset.tolist(), size=size.tolist(), alias_offset=alias_offset.tolist(),
        shape=[axes[begin:end] for begin, end in tables.ends], extent=extent, rows=chunk,
        num_chunks=[-(-whole // part) for whole, part in zip(extent, chunk, strict=True)],
    )  # fmt: skip


def _tables(variant: Variant) -> Tables:
    if variant.tables is None:
        buffers = variant.body.buffers
        aliases = [(b, x.alias_of, x.alias_offset) for b, x in enumerate(buffers) if x.alias_of is not None]
        columns = np.array(aliases, dtype=np.intp).reshape(len(aliases), 3).T
        ends = np.cumsum([0, *(len(x.shape) for x in buffers)]).tolist()
        variant.tables = Tables(
            bytes=np.array([x.bytes for x in buffers], dtype=np.intp),
            rotates=np.array([x.rotate for x in buffers], dtype=np.int64),
            aliases=columns[0], alias_roots=columns[1], alias_offsets=columns[2],
            shapes=np.array([row for x in buffers for row in x.shape], dtype=np.intp),
            ends=list(pairwise(ends)), stacks=list(_stacks(variant)),
        )  # fmt: skip
    return variant.tables


def _stacks(variant: Variant) -> Iterator[Ids]:
    """The buffers that no solver places, by pool, in the order of their addresses.

    Weights come first, sorted by name: the order of registration depends on choices and phases, but a weight must have
    one address in all plans with the same weights in its pool. Host memory holds them before the hidden states for the
    same reason.
    """
    buffers, roots = variant.body.buffers, set(variant.formula.roots.tolist())
    outside = [b for b, x in enumerate(buffers) if b not in roots and x.alias_of is None]
    outside.sort(key=lambda b: _rank(buffers[b]))
    for pool in dict.fromkeys(buffers[b].pool for b in outside):
        yield np.array([b for b in outside if buffers[b].pool == pool], dtype=np.intp)


def _rank(record: BufferRecord) -> tuple[bool, list[str | int]]:
    """The sort key of a pool's buffers: weights by name, layer 2 before layer 10, then the rest in order."""
    name = record.tensor or (record.name if record.kind == "weight" else "")
    return not name, [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name)]
