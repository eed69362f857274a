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
    PREFIX,
    SERVED,
    SHIFTED,
    SPAN,
    START,
    STATE,
    WHOLE,
    WINDOW,
    WRITTEN,
    C,
    closes,
)
from mosaic.registrar import request_table
from mosaic.registrar.operators.advance_requests import WIDTH
from mosaic.registrar.operators.read_canvas import OPEN as OPEN_TOKEN
from mosaic.registrar.request_table import Column, Reported

AT_ONCE: Final = 64  # untuned default
CANVAS, PROMPT, END, STEP, STOP = (
    tl.constexpr(int(column)) for column in (Column.CANVAS, Column.PROMPT, Column.END, Column.STEP, Column.STOP)
)
STOPS, ENDED = tl.constexpr(request_table.STOPS), tl.constexpr(request_table.ENDED)
HAS_ALL, HAS_STOP = tl.constexpr(request_table.LENGTH), tl.constexpr(request_table.EOS)
W = tl.constexpr(WIDTH)
CHANGED = tl.constexpr(int(Reported.WRITTEN))
NOTHING = tl.constexpr(OPEN_TOKEN)
FAR = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["windows"])
def advance_requests_kernel(
    table, canvas, row, begin, cu_seqlens, cu_rows, committed, report, windows, AT_ONCE: tl.constexpr, LINE: tl.constexpr,
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
    fills = written < prefix
    taken = open_left * 0
    last_row = tl.load(cu_rows + window + 1)
    for at in range(tl.load(cu_rows + window), last_row, AT_ONCE):
        taken += tl.sum(tl.load(committed + at + lane, mask=at + lane < last_row, other=0).to(tl.int64), 0)
    written += tl.where(fills, tokens, 0)
    decided = tl.where(fills, 0, 1)
    open_left -= taken
    step += decided
    closing = closes(line, request >= 0)
    number += tl.where(closing, 0, decided)
    tl.store(said + 3, start - tl.where(closing, before, 0))
    before = tl.where(fills, before, 0)

    end, stop = tl.load(line + END), start + block
    own = canvas + tl.load(line + CANVAS)
    until = tl.minimum(stop, end)
    first_open, masked = until * 0 + FAR, tl.maximum(end - stop, 0)
    for at in range(start, until, AT_ONCE):
        position = at + lane
        none = tl.load(own + position, mask=position < until, other=NOTHING + 1) == NOTHING
        first_open = tl.minimum(first_open, tl.min(tl.where(none, position, FAR), 0))
        masked += tl.sum(none.to(tl.int64), 0)
    final = tl.minimum(first_open, until)
    first_stop = until * 0 + FAR
    for at in range(tl.maximum(start, tl.load(line + PROMPT)), final, AT_ONCE):
        position = at + lane
        token = tl.load(own + position, mask=position < final, other=NOTHING)
        stops = token < NOTHING
        for which in tl.static_range(STOPS):
            stops = stops | ((token == tl.load(line + STOP + which)) & (token != NOTHING))
        first_stop = tl.minimum(first_stop, tl.min(tl.where(stops, position, FAR), 0))
    ended = tl.where(first_stop < FAR, HAS_STOP, tl.where(final == end, HAS_ALL, 0))
    tl.store(line + STATE, ended * 0 + ENDED, mask=ended > 0)
    done = (ended == 0) & (open_left == 0)
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
    waits = (tl.load(line + SHIFTED) != 0) & (open_left > 0)
    waits = waits & (tl.load(own + start, mask=waits, other=NOTHING + 1) == NOTHING)
    wide = (tl.load(line + WINDOW) == WHOLE) | (number == 0) | waits
    keep(line, said, 0, written)
    keep(line, said, 1, start)
    keep(line, said, 2, before)
    keep(line, said, 3, number)
    keep(line, said, 4, step)
    keep(line, said, 5, open_left)
    keep(line, said, 6, wide.to(tl.int64))
    keep(line, said, 7, served)


@triton.jit
def keep(line, said, place: tl.constexpr, value):
    """Write a column that changes, and say it."""
    tl.store(line + WRITTEN + place, value)
    tl.store(said + CHANGED + place, value)


def launch(
    *, table: Tensor, canvas: Tensor, row: Tensor, begin: Tensor, cu_seqlens: Tensor, cu_rows: Tensor, committed:
    Tensor, report: Tensor, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Update the table, and write the report."""
    advance_requests_kernel[(row.shape[0],)](
        table,
        canvas,
        row,
        begin,
        cu_seqlens,
        cu_rows,
        committed,
        report,
        row.shape[0],
        AT_ONCE=AT_ONCE,
        LINE=32,
        num_warps=2,
    )
