"""place_requests on CUDA: where the tokens, rows to decide and keys of the requests that a step serves lie.

One program a window, and one more for what lies beyond the last. Legend: T tokens, M rows, E extents, B windows.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import tl, triton
from mosaic.kernels.cuda.shared.requests import (
    BLOCK,
    DECIDES,
    PROMPT,
    SHIFTED,
    START,
    C,
    alone,
    edits,
    float_of,
    key_of,
    quota_of,
)
from mosaic.kernels.cuda.shared.sampling import row_word, uniform
from mosaic.registrar import request_table
from mosaic.registrar.operators.read_canvas import OPEN
from mosaic.registrar.request_table import Column

AT_ONCE: Final = 128  # untuned default
COMPARED: Final = 16
"""Positions that random numbers are compared with at once: more of them spill."""
CANVAS, EXTENT, THRESHOLD = (tl.constexpr(int(one)) for one in (Column.CANVAS, Column.EXTENT, Column.THRESHOLD))
RANDOM_ONES, LEAST_ONES = tl.constexpr(request_table.RANDOM_ONES), tl.constexpr(request_table.LEAST_ONES)
EDIT_THRESHOLD = tl.constexpr(int(Column.EDIT_THRESHOLD))
NOTHING = tl.constexpr(OPEN)


@triton.jit(do_not_specialize=["sequences", "tokens", "most", "count"])
def place_requests_kernel(
    table, canvas, held_extents, row, begin, cu_seqlens, cu_rows, cu_extents, positions, token_rows, rows, decided_rows,
    extents, quota, threshold, edit_threshold, sequences, tokens, most, count, AT_ONCE: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    window = tl.program_id(0)
    lane = tl.arange(0, AT_ONCE)
    nothing = lane.to(tl.int64) * 0
    if window == sequences:  # what belongs to nobody
        for at in range(tl.load(cu_seqlens + sequences), tokens, AT_ONCE):
            tl.store(positions + at + lane, lane * 0, mask=at + lane < tokens)
            tl.store(token_rows + at + lane, nothing - 1, mask=at + lane < tokens)
        for at in range(tl.load(cu_rows + sequences), most, AT_ONCE):
            tl.store(rows + at + lane, nothing, mask=at + lane < most)
            tl.store(decided_rows + at + lane, nothing - 1, mask=at + lane < most)
        for at in range(4 * tl.load(cu_extents + sequences), 4 * count, AT_ONCE):
            tl.store(extents + at + lane, nothing, mask=at + lane < 4 * count)
        return
    request = tl.load(row + window)
    known = request >= 0
    line = table + request * C
    start, end = tl.load(cu_seqlens + window), tl.load(cu_seqlens + window + 1)
    first, own_canvas = tl.load(begin + window), tl.load(line + CANVAS, mask=known, other=0)
    for at in range(start, end, AT_ONCE):
        position = first + at - start + lane
        tl.store(positions + at + lane, position, mask=at + lane < end)
        tl.store(token_rows + at + lane, own_canvas + position, mask=at + lane < end)
    row_at, last_row = tl.load(cu_rows + window), tl.load(cu_rows + window + 1)
    block_start, block = tl.load(line + START, mask=known, other=0), tl.load(line + BLOCK, mask=known, other=0)
    first += tl.load(line + SHIFTED, mask=known, other=0)  # whose row predicts the window's first position
    decides, all_ones = tl.load(line + DECIDES, mask=known, other=0), edits(line, known)
    prompt = tl.load(line + PROMPT, mask=known, other=0)
    drawn = ((decides == RANDOM_ONES) | (decides == LEAST_ONES)) & (alone(line, known) == 0)
    sign = tl.where(decides == LEAST_ONES, -1.0, 1.0)
    least = tl.where(drawn, last_row - row_at, block + 1)
    for at in range(0, tl.where(last_row > row_at, block, 0), AT_ONCE):
        position = block_start + at + lane
        token = tl.load(canvas + own_canvas + position, mask=at + lane < block, other=NOTHING + 1)
        larger = lane * 0
        if drawn:
            chance = uniform(row_word(2, key_of(line, known, position))) * sign
            for other in range(0, block, COMPARED):
                number = other + tl.arange(0, COMPARED)
                place = block_start + number
                beside = tl.load(canvas + own_canvas + place, mask=number < block, other=NOTHING + 1)
                its = uniform(row_word(2, key_of(line, known, place)))[None, :] * sign
                before = (its > chance[:, None]) | ((its == chance[:, None]) & (place[None, :] < position[:, None]))
                larger += tl.sum((before & (beside == NOTHING)[None, :]).to(tl.int32), 1)
        answer = (at + lane < block) & (position >= prompt)
        open_ = ((token == NOTHING) & (larger < least) | all_ones & answer).to(tl.int32)
        place = row_at + tl.cumsum(open_, 0) - open_
        mine = (open_ > 0) & (place < last_row)
        tl.store(decided_rows + place, own_canvas + position, mask=mine)
        tl.store(rows + place, position - first + start, mask=mine)
        row_at += tl.sum(open_, 0)
    extent_at, last_extent = tl.load(cu_extents + window), tl.load(cu_extents + window + 1)
    held = held_extents + 4 * (tl.load(line + EXTENT, mask=known, other=0) - extent_at)
    for at in range(4 * extent_at, 4 * last_extent, AT_ONCE):
        mine = at + lane < 4 * last_extent
        tl.store(extents + at + lane, tl.load(held + at + lane, mask=mine, other=0), mask=mine)
    tl.store(quota + window, quota_of(line, known).to(tl.int32))
    tl.store(threshold + window, float_of(line, THRESHOLD, known))
    tl.store(edit_threshold + window, float_of(line, EDIT_THRESHOLD, known))


def launch(
    *, table: Tensor, canvas: Tensor, held_extents: Tensor, row: Tensor, begin: Tensor, cu_seqlens: Tensor, cu_rows:
    Tensor, cu_extents: Tensor, positions: Tensor, token_rows: Tensor, rows: Tensor, decided_rows: Tensor, extents:
    Tensor, quota: Tensor, threshold: Tensor, edit_threshold: Tensor, tokens: int = 0, most: int = 0, count: int = 0,
    scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write all outputs."""
    sequences = row.shape[0]
    place_requests_kernel[(sequences + 1,)](
        table, canvas, held_extents, row, begin, cu_seqlens, cu_rows, cu_extents, positions, token_rows, rows,
        decided_rows, extents, quota, threshold, edit_threshold, sequences, positions.shape[0], rows.shape[0],
        extents.shape[0], AT_ONCE=AT_ONCE, COMPARED=COMPARED,
    )  # fmt: skip
