"""Draft a plan from a solved configuration, and write it as the document `mosaic.plan/1`.

A draft is what the checker proves: the variant's rows, which dims do not change, and numbers by columns. The document,
with all that the checker and the executor need as integers and strings in a fixed order, is written from them on first
use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from mosaic.planner.check import Numbers, Records
from mosaic.planner.cost import op_totals
from mosaic.planner.peaks import formula_text
from mosaic.planner.records import numbers_of, records_of
from mosaic.planner.search import SearchResult
from mosaic.planner.space import Config, Point, Space
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
