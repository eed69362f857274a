"""Records of a plan's buffers, ops and regions: rows that dims do not change, made once per variant, and their numbers.

The document is written from them and the checker's proof reads them, so both describe the same plan.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mosaic.planner.body import BufferRecord
from mosaic.planner.check import Numbers, Records
from mosaic.planner.lifetimes import BarrierRecord
from mosaic.planner.peaks import ALIGNMENT
from mosaic.planner.space import Config, Ids, Point, Tables, Variant

_Row = Mapping[str, Any]


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


def _op_rows(variant: Variant) -> Iterator[_Row]:
    on = {variant.body.regions[i].name for i in variant.life.regions}
    for index, op in enumerate(variant.body.ops):
        yield {
            "index": index, "name": op.name, "kernel": op.kernel, "stream": op.stream,
            "region": _active_parent(variant, op.region), "reads": op.reads, "writes": op.writes,
            "operands": op.operands, "attrs": op.attrs, "inplace": op.inplace,
            "slices": [s for s in op.slices if s[2] in on],
        }  # fmt: skip


def _buffer_rows(variant: Variant) -> Iterator[_Row]:
    body, life = variant.body, variant.life
    for b, record in enumerate(body.buffers):
        yield {
            "id": b, "name": record.name, "kind": record.kind, "pool": record.pool, "start": life.starts[b],
            "end": life.ends[b], "gaps": [list(gap) for gap in life.gaps[b]], "alias_of": record.alias_of,
            "dtype": record.dtype, "alignment": ALIGNMENT,
            "region": body.regions[home].name if (home := life.homes[b]) is not None else None,
            "tensor": record.tensor, "rotate": record.rotate,
        }  # fmt: skip


def _region_rows(variant: Variant) -> Iterator[_Row]:
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


# Numbers.


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
