"""advance_requests on CUDA: a table of requests after a step, and what the step says of each that it has served.

One program a window. Legend: S requests, C columns, B windows.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import tl, triton
from mosaic.kernels.cuda.shared.requests import (
    BEFORE,
    BLOCK,
    CANVAS_LONG,
    LENGTH,
    NUMBER,
    OPEN,
    PACKED,
    PREFIX,
    PROMPT,
    QUOTA,
    SERVED,
    SHIFTED,
    SPAN,
    START,
    STATE,
    WHOLE,
    WIDE,
    WINDOW,
    WRITTEN,
    C,
    bit_of,
    closes,
    edits,
    mixed,
    packed_span,
)
from mosaic.registrar import request_table
from mosaic.registrar.operators.advance_requests import WIDTH
from mosaic.registrar.operators.read_canvas import OPEN as OPEN_TOKEN
from mosaic.registrar.request_table import Column, Reported

AT_ONCE: Final = 64  # untuned default
CANVAS, END, STEP, STOP = (tl.constexpr(int(one)) for one in (Column.CANVAS, Column.END, Column.STEP, Column.STOP))
SINCE, SAVED, POST_STEPS, SCHEDULE = (
    tl.constexpr(int(one)) for one in (Column.SINCE, Column.SAVED, Column.POST_STEPS, Column.SCHEDULE)
)
STOPS, ENDED = tl.constexpr(request_table.STOPS), tl.constexpr(request_table.ENDED)
HAS_ALL, HAS_STOP = tl.constexpr(request_table.LENGTH), tl.constexpr(request_table.EOS)
W = tl.constexpr(WIDTH)
CHANGED = tl.constexpr(int(Reported.WRITTEN))
NOTHING = tl.constexpr(OPEN_TOKEN)
FAR = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["windows", "mask_id"])
def advance_requests_kernel(
    table, canvas, row, begin, cu_seqlens, cu_rows, report, windows, mask_id, AT_ONCE: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    window = tl.program_id(0)
    request = tl.load(row + window)
    said, column = report + window * W, tl.arange(0, LINE)
    tokens = tl.load(cu_seqlens + window + 1) - tl.load(cu_seqlens + window)
    if (request < 0) | (tokens == 0):
        turn = table + request * C + SERVED
        waits = request >= 0
        tl.store(turn, tl.load(turn, mask=waits, other=0) - windows + window, mask=waits)
        tl.store(said + column, tl.where(column == 0, -1, 0).to(tl.int64), mask=column < W)
        return
    lane, line = tl.arange(0, AT_ONCE), table + request * C
    written, prefix = tl.load(line + WRITTEN), tl.load(line + PREFIX)
    start, block, number, open_left = (
        tl.load(line + START),
        tl.load(line + BLOCK),
        tl.load(line + NUMBER),
        tl.load(line + OPEN),
    )
    before, step, served = tl.load(line + BEFORE), tl.load(line + STEP), tl.load(line + SERVED)
    quota, since, saved = tl.load(line + QUOTA), tl.load(line + SINCE), tl.load(line + SAVED)
    fills = written < prefix
    last_row = tl.load(cu_rows + window + 1)
    written += tl.where(fills, tokens, 0)
    packed, known = tl.load(line + WINDOW) == PACKED, request >= 0
    _, packed_end, _ = packed_span(line, known, start)
    refreshes = packed & (tl.load(line + WIDE) != 0) & (bit_of(line, known, number + 1) == 0)
    written = tl.where(refreshes, packed_end, written)
    decided = tl.where(fills, 0, 1)
    step += decided
    closing = closes(line, request >= 0)
    number += tl.where(closing, 0, decided)
    tl.store(said + 3, start - tl.where(closing, before, 0))
    before = tl.where(fills, before, 0)

    end, stop = tl.load(line + END), start + block
    own = canvas + tl.load(line + CANVAS)
    until = tl.minimum(stop, end)
    first_open, masked = until * 0 + FAR, tl.maximum(end - stop, 0)
    left, as_mask, now = until * 0, until * 0, until * 0
    for at in range(start, stop, AT_ONCE):
        position = at + lane
        inside = position < stop
        token = tl.load(own + position, mask=inside, other=NOTHING + 1)
        none = (token == NOTHING) & inside
        first_open = tl.minimum(first_open, tl.min(tl.where(none, position, FAR), 0))
        left += tl.sum(none.to(tl.int64), 0)
        masked += tl.sum((none & (position < until)).to(tl.int64), 0)
        as_mask += tl.sum(((token == mask_id) & inside).to(tl.int64), 0)
        now += tl.sum(tl.where(inside, mixed(token ^ mixed(position.to(tl.int64))), 0), 0)
    # what editing goes by
    all_ones, notes = edits(line, request >= 0), edits(line, request >= 0) & (fills == 0)
    since = tl.where(notes, tl.where(left < open_left, 0, since + 1), since)
    again = now == saved
    saved = tl.where(notes & ((left == 0) | ((since & (since - 1)) == 0)), now, saved)
    quota = tl.where(notes, 1 + tl.where(again, as_mask, 0), quota)
    open_left = left
    enough = notes & ((since >= tl.load(line + POST_STEPS)) | (again & (since > 0)))
    done = (left == 0) & ((all_ones == 0) | enough)
    first = tl.maximum(start, tl.load(line + PROMPT))
    final = tl.where(all_ones & (done == 0), first, tl.minimum(first_open, until))
    first_stop = until * 0 + FAR
    for at in range(first, final, AT_ONCE):
        position = at + lane
        token = tl.load(own + position, mask=position < final, other=NOTHING)
        stops = token < NOTHING
        for which in tl.static_range(STOPS):
            stops = stops | ((token == tl.load(line + STOP + which)) & (token != NOTHING))
        first_stop = tl.minimum(first_stop, tl.min(tl.where(stops, position, FAR), 0))
    ended = tl.where(first_stop < FAR, HAS_STOP, tl.where(final == end, HAS_ALL, 0))
    tl.store(line + STATE, ended * 0 + ENDED, mask=ended > 0)
    done = (ended == 0) & done
    tl.store(said, request)
    tl.store(said + 1, tl.load(begin + window).to(tl.int64))
    tl.store(said + 2, tokens.to(tl.int64))
    tl.store(said + 4, tl.where(first_stop < FAR, first_stop + 1, final))
    tl.store(said + 5, masked)
    tl.store(said + 6, ended.to(tl.int64))
    tl.store(said + 7, last_row.to(tl.int64))
    span = tl.load(line + SPAN)
    leaves = done & (stop % span == 0)
    before = tl.where(done, tl.where(leaves, span, 0), before)
    open_left = tl.where(done, tl.minimum(block, tl.load(line + LENGTH) - stop), open_left)
    number = tl.where(leaves | (done & (span == CANVAS_LONG)), 0, number)
    start = tl.where(done, stop, start)
    since, saved = tl.where(done, 0, since), tl.where(done, 0, saved)
    quota = tl.where(done & all_ones, 1, quota)
    scheduled = number < tl.load(line + SCHEDULE)
    entry = tl.load(own + tl.load(line + LENGTH) + number, mask=scheduled, other=0)
    step, quota = tl.where(scheduled, entry >> 32, step), tl.where(scheduled, entry & 0xFFFFFFFF, quota)
    waits = (tl.load(line + SHIFTED) != 0) & (open_left > 0)
    waits = waits & (tl.load(own + start, mask=waits, other=NOTHING + 1) == NOTHING)
    wide = (tl.load(line + WINDOW) == WHOLE) | (number == 0) | waits
    wide = tl.where(packed, bit_of(line, known, number) & (start >= written), wide)
    keep(line, said, 0, written)
    keep(line, said, 1, start)
    keep(line, said, 2, before)
    keep(line, said, 3, number)
    keep(line, said, 4, step)
    keep(line, said, 5, open_left)
    keep(line, said, 6, wide.to(tl.int64))
    keep(line, said, 7, quota)
    keep(line, said, 8, since)
    keep(line, said, 9, saved)
    keep(line, said, 10, served)


@triton.jit
def keep(line, said, place: tl.constexpr, value):
    """Write a column that changes, and say it."""
    tl.store(line + WRITTEN + place, value)
    tl.store(said + CHANGED + place, value)


def launch(
    *, table: Tensor, canvas: Tensor, row: Tensor, begin: Tensor, cu_seqlens: Tensor, cu_rows: Tensor, report: Tensor,
    mask_id: int = 0, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Update the table, and write the report."""
    advance_requests_kernel[(row.shape[0],)](
        table,
        canvas,
        row,
        begin,
        cu_seqlens,
        cu_rows,
        report,
        row.shape[0],
        mask_id,
        AT_ONCE=AT_ONCE,
        LINE=32,
        num_warps=2,
    )
