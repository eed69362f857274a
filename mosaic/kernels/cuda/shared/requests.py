"""The columns of a table of requests on CUDA, and what a request wants of its next step."""

from __future__ import annotations

from mosaic.kernels.cuda.shared.launching import tl, triton
from mosaic.registrar import request_table
from mosaic.registrar.request_table import COLUMNS, Column

__all__ = [
    "C", "alone", "bit_of", "closes", "edits", "float_of", "is_new", "key_of", "mark_of", "mixed", "packed_span", "quota_of",
    "reads_on", "wants",
]  # fmt: skip

C = tl.constexpr(COLUMNS)
STATE, EXTENTS, PREFIX, LENGTH, BLOCK = (
    tl.constexpr(int(column)) for column in (Column.STATE, Column.EXTENTS, Column.PREFIX, Column.LENGTH, Column.BLOCK)
)
WINDOW, QUOTA, MORE, DECIDES, GROUP, MARKS, SPAN, SHIFTED, PRIORITY = (
    tl.constexpr(int(column))
    for column in (
        Column.WINDOW, Column.QUOTA, Column.MORE, Column.DECIDES, Column.GROUP, Column.MARKS, Column.SPAN, Column.SHIFTED,
        Column.PRIORITY,
    )
)  # fmt: skip
WRITTEN, START, BEFORE, NUMBER, OPEN, WIDE, SERVED = (
    tl.constexpr(int(column))
    for column in (
        Column.WRITTEN, Column.START, Column.BEFORE, Column.NUMBER, Column.OPEN, Column.WIDE, Column.SERVED
    )
)  # fmt: skip
NOISE, STEP = tl.constexpr(int(Column.NOISE)), tl.constexpr(int(Column.STEP))
RUNNING, MARKED_STEPS = tl.constexpr(request_table.RUNNING), tl.constexpr(request_table.MARKED_STEPS)
FROM_BLOCK, CANVAS_LONG = tl.constexpr(request_table.FROM_BLOCK), tl.constexpr(request_table.CANVAS_LONG)
OPEN_ONES, WHOLE = tl.constexpr(request_table.OPEN_ONES), tl.constexpr(request_table.WHOLE)
ALL_ONES, PROMPT = tl.constexpr(request_table.ALL_ONES), tl.constexpr(int(Column.PROMPT))
PACKED, RENEWED, KEPT, KEPT_LAST = (
    tl.constexpr(int(one)) for one in (request_table.PACKED, Column.RENEWED, Column.KEPT, Column.KEPT_LAST)
)


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
def closes(line, known):
    """Whether the next step writes what precedes the block, and decides its first position alone."""
    return (tl.load(line + SHIFTED, mask=known, other=0) != 0) & (tl.load(line + BEFORE, mask=known, other=0) > 0)


@triton.jit
def alone(line, known):
    """Whether the next step decides the first position of the block alone."""
    first = (tl.load(line + NUMBER, mask=known, other=1) == 0) & (tl.load(line + SHIFTED, mask=known, other=0) != 0)
    in_canvas = tl.load(line + SPAN, mask=known, other=0) == CANVAS_LONG
    whole = tl.load(line + WINDOW, mask=known, other=0) == WHOLE
    return closes(line, known) | (first & in_canvas & (whole == 0))


@triton.jit
def edits(line, known):
    """Whether steps decide all positions of the block but the prompt's."""
    return tl.load(line + DECIDES, mask=known, other=0) == ALL_ONES


@triton.jit
def mark_of(line, known):
    """Whether the next step of a request's block has its bit in MARKS; of packed keys, and computes the span."""
    packed = tl.load(line + WINDOW, mask=known, other=0) == PACKED
    wide = tl.load(line + WIDE, mask=known, other=0) != 0
    return bit_of(line, known, tl.load(line + NUMBER, mask=known, other=0)) & ((packed == 0) | wide)


@triton.jit
def bit_of(line, known, number):
    """Whether a step of a request's block has its bit in MARKS."""
    return (tl.load(line + MARKS, mask=known, other=0) >> tl.minimum(number, MARKED_STEPS)) & 1 != 0


@triton.jit
def packed_span(line, known, start):
    """The packed span of the block at `start`, its first and last end, and the keys that a head keeps beside it."""
    prompt = tl.load(line + PROMPT, mask=known, other=0)
    width = tl.maximum(tl.load(line + RENEWED, mask=known, other=1), 1)
    low = start - (start - prompt) % width
    high = tl.minimum(low + width, tl.load(line + LENGTH, mask=known, other=0))
    kept, last = tl.load(line + KEPT, mask=known, other=0), tl.load(line + KEPT_LAST, mask=known, other=0)
    return low, high, tl.where(high - low == width, kept, last)


@triton.jit
def wants(line, known, groups, marked):
    """Of rows of the table, in a step of groups, marked or not: who decides, who reads its prompt, the window, the keys it sees,
    rows, extents, span, the turn in which it was served, and the one by which it comes before others."""
    running = tl.load(line + STATE, mask=known, other=0) == RUNNING
    written, prefix = tl.load(line + WRITTEN, mask=known, other=0), tl.load(line + PREFIX, mask=known, other=0)
    start, length = tl.load(line + START, mask=known, other=0), tl.load(line + LENGTH, mask=known, other=0)
    block, window = tl.load(line + BLOCK, mask=known, other=1), tl.load(line + WINDOW, mask=known, other=0)
    span = tl.maximum(tl.load(line + SPAN, mask=known, other=1), 1)  # rows of nobody have none
    mine = ((groups >> tl.load(line + GROUP, mask=known, other=0)) & 1 != 0) & (
        (mark_of(line, known) == 0) | (marked != 0)
    )
    fills, closing, wide = written < prefix, closes(line, known), tl.load(line + WIDE, mask=known, other=0) != 0
    span_start = start - start % span
    span_end = tl.minimum(span_start + span, length)
    begin = tl.where(wide, span_start, start) - tl.load(line + BEFORE, mask=known, other=0)
    end = tl.where(wide | (window == FROM_BLOCK), span_end, start + block)
    begin, end = tl.where(fills, written, begin), tl.where(fills, prefix, tl.where(closing, start, end))
    low, high, kept = packed_span(line, known, start)
    packed = window == PACKED
    first = (tl.load(line + NUMBER, mask=known, other=1) == 0) & (tl.load(line + SHIFTED, mask=known, other=0) != 0)
    begin -= (packed & (wide == 0) & first).to(tl.int64)
    seen = tl.where(packed, tl.where(wide, 0, kept + high - low), tl.where(closing, start, span_end))
    open_, decides = tl.load(line + OPEN, mask=known, other=0), tl.load(line + DECIDES, mask=known, other=0)
    rows = tl.where(decides == OPEN_ONES, open_, tl.minimum(quota_of(line, known), open_))
    answer = start + block - tl.maximum(start, tl.load(line + PROMPT, mask=known, other=0))
    rows = tl.where(alone(line, known), 1, tl.where(edits(line, known), answer, rows))
    extents, served = tl.load(line + EXTENTS, mask=known, other=0), tl.load(line + SERVED, mask=known, other=0)
    return (
        running & mine & (written >= prefix),
        running & fills & (groups == 1),
        begin,
        end,
        seen,
        rows,
        extents,
        span,
        served,
        served - tl.load(line + PRIORITY, mask=known, other=0),
    )


@triton.jit
def reads_on(line, known):
    """Whose prompt is not written."""
    running = tl.load(line + STATE, mask=known, other=0) == RUNNING
    return running & (tl.load(line + WRITTEN, mask=known, other=0) < tl.load(line + PREFIX, mask=known, other=0))


@triton.jit
def is_new(line, known):
    """Who has decided nothing so far."""
    return tl.load(line + STEP, mask=known, other=1) == 0


@triton.jit
def key_of(line, known, position):
    """The random keys of positions in the next step."""
    step = mixed(tl.load(line + NOISE, mask=known, other=0) ^ tl.load(line + STEP, mask=known, other=0))
    return mixed(position ^ step)


@triton.jit
def mixed(word):
    """The finaliser of splitmix64, of int64 words."""
    word = word.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return (word ^ (word >> 31)).to(tl.int64, bitcast=True)
