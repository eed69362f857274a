"""The columns of a table of requests on CUDA, and what a request wants of its next step."""

from __future__ import annotations

from mosaic.kernels.cuda.shared.launching import tl, triton
from mosaic.registrar import request_table
from mosaic.registrar.request_table import COLUMNS, Column

__all__ = ["C", "float_of", "mark_of", "mixed", "quota_of", "wants"]

C = tl.constexpr(COLUMNS)
STATE, EXTENTS, PREFIX, LENGTH, BLOCK = (
    tl.constexpr(int(column)) for column in (Column.STATE, Column.EXTENTS, Column.PREFIX, Column.LENGTH, Column.BLOCK)
)
WINDOW, QUOTA, MORE, IN_ORDER, GROUP, MARKS = (
    tl.constexpr(int(column))
    for column in (Column.WINDOW, Column.QUOTA, Column.MORE, Column.IN_ORDER, Column.GROUP, Column.MARKS)
)
WRITTEN, START, BEFORE, NUMBER, OPEN, SERVED = (
    tl.constexpr(int(column))
    for column in (Column.WRITTEN, Column.START, Column.BEFORE, Column.NUMBER, Column.OPEN, Column.SERVED)
)
RUNNING, MARKED_STEPS = tl.constexpr(request_table.RUNNING), tl.constexpr(request_table.MARKED_STEPS)
BY_BLOCKS, FROM_BLOCK = tl.constexpr(request_table.BY_BLOCKS), tl.constexpr(request_table.FROM_BLOCK)


@triton.jit
def float_of(line, column, known):
    """A number that the table has as the bits of a float32."""
    return tl.load(line + column, mask=known, other=0).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def quota_of(line, known):
    """How many tokens the next step of a request's block commits at least."""
    more = tl.load(line + NUMBER, mask=known, other=0) < tl.load(line + MORE, mask=known, other=0)
    return tl.load(line + QUOTA, mask=known, other=0) + more.to(tl.int64)


@triton.jit
def mark_of(line, known):
    """Whether the next step of a request's block has its bit in MARKS."""
    number = tl.load(line + NUMBER, mask=known, other=0)
    return (tl.load(line + MARKS, mask=known, other=0) >> tl.minimum(number, MARKED_STEPS)) & 1 != 0


@triton.jit
def wants(line, known, group, marked):
    """Of rows of the table, in a step of a group, marked or not: who decides, who reads its prompt, the window, the keys it sees,
    rows, extents, block and turn."""
    running = tl.load(line + STATE, mask=known, other=0) == RUNNING
    written, prefix = tl.load(line + WRITTEN, mask=known, other=0), tl.load(line + PREFIX, mask=known, other=0)
    start, length = tl.load(line + START, mask=known, other=0), tl.load(line + LENGTH, mask=known, other=0)
    block, window = tl.load(line + BLOCK, mask=known, other=1), tl.load(line + WINDOW, mask=known, other=0)
    first, blocks = tl.load(line + NUMBER, mask=known, other=0) == 0, window == BY_BLOCKS
    mine = (tl.load(line + GROUP, mask=known, other=0) == group) & ((mark_of(line, known) == 0) | (marked != 0))
    fills = written < prefix
    before = tl.load(line + BEFORE, mask=known, other=0)
    begin = tl.where(first, tl.where(blocks, start - before, 0), start)
    end = tl.where((first & (window != BY_BLOCKS)) | (window == FROM_BLOCK), length, start + block)
    seen = tl.where(blocks, end, length)
    open_ = tl.load(line + OPEN, mask=known, other=0)
    ordered = tl.load(line + IN_ORDER, mask=known, other=0) != 0
    rows = tl.where(ordered, tl.minimum(quota_of(line, known), open_), open_)
    begin, end = tl.where(fills, written, begin), tl.where(fills, prefix, end)
    extents, served = tl.load(line + EXTENTS, mask=known, other=0), tl.load(line + SERVED, mask=known, other=0)
    return (
        running & mine & (written >= prefix),
        running & fills & (group == 0),
        begin,
        end,
        seen,
        rows,
        extents,
        block,
        served,
    )


@triton.jit
def mixed(word):
    """The finaliser of splitmix64, of int64 words."""
    word = word.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return (word ^ (word >> 31)).to(tl.int64, bitcast=True)
