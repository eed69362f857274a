"""pack_requests on CUDA: which requests of a table a step serves, and the bounds of their windows, in one program.

Nothing is sorted: what comes before a request is added up by comparing turns, some requests at a time. Legend: S requests of the
table, B windows.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import power_of_two, tl, triton
from mosaic.kernels.cuda.shared.requests import SERVED, C, is_new, reads_on, wants
from mosaic.registrar.operators.pack_requests import KEPT_SHARE, PATIENCE, TOGETHER

MOST: Final = 1024
"""Requests that one program compares; a session has no more."""
AT_ONCE: Final = 2048
"""Comparisons at once. With 16,384 of them a program of `MOST` requests compiles for minutes."""


@triton.jit(do_not_specialize=["sequences"])
def pack_requests_kernel(
    table, room, row, begin, seen, cu_seqlens, cu_rows, cu_extents, sequences, PATIENCE: tl.constexpr, KEPT_SHARE:
    tl.constexpr, TOGETHER: tl.constexpr, LANES: tl.constexpr, COMPARED: tl.constexpr, WINDOWS: tl.constexpr,
):  # fmt: skip
    first, count, tokens = tl.load(room), tl.load(room + 1), tl.load(room + 2)
    rows, extents, groups, marked = tl.load(room + 3), tl.load(room + 4), tl.load(room + 5), tl.load(room + 6)
    holds = tl.load(room + 7) != 0
    lane = tl.arange(0, LANES)
    known = lane < count
    line = table + (first + lane) * C
    decides, fills, start, end, keys, own_rows, own_extents, span, served, own_turn = wants(line, known, groups, marked)
    # who has decided nothing waits for prompts from this turn on
    held_from = tl.min(tl.where(holds & reads_on(line, known), own_turn, 0x7FFFFFFFFFFFFFFF), 0) - TOGETHER
    decides = decides & (end - start <= tokens) & ((is_new(line, known) & (own_turn >= held_from)) == 0)
    key = own_turn * LANES + lane
    turn = tl.max(served, 0) + 1
    # the prompt that came first, and what is kept for prompts
    oldest = tl.min(tl.where(fills, key, 0x7FFFFFFFFFFFFFFF), 0)
    waited = turn - tl.min(tl.where(fills, own_turn, turn), 0)
    least = tl.max(tl.where(fills & (key == oldest), span, 0), 0)
    kept = tl.where((waited >= PATIENCE) & (least > 0), tl.maximum(tokens // KEPT_SHARE, least), 0)
    zero = lane.to(tl.int64) * 0
    before, tokens_before, rows_before, extents_before, prompts, prompt_tokens, prompt_extents = (
        zero, zero, zero, zero, zero, zero, zero
    )  # fmt: skip
    for other in range(0, count, COMPARED):
        number = other + tl.arange(0, COMPARED)
        there = number < count
        others, filling, its_start, its_end, _, its_rows, its_extents, _, _, its_turn = wants(
            table + (first + number) * C, there, groups, marked
        )
        others = others & ((is_new(table + (first + number) * C, there) & (its_turn >= held_from)) == 0)
        earlier = (its_turn * LANES + number)[None, :] < key[:, None]
        length = its_end - its_start
        mine = earlier & (others & there & (length <= tokens))[None, :]
        before += tl.sum(mine.to(tl.int64), 1)
        tokens_before += tl.sum(tl.where(mine, length[None, :], 0), 1)
        rows_before += tl.sum(tl.where(mine, its_rows[None, :], 0), 1)
        extents_before += tl.sum(tl.where(mine, its_extents[None, :], 0), 1)
        mine = earlier & (filling & there)[None, :]
        prompts += tl.sum(mine.to(tl.int64), 1)
        prompt_tokens += tl.sum(tl.where(mine, length[None, :], 0), 1)
        prompt_extents += tl.sum(tl.where(mine, its_extents[None, :], 0), 1)
    length = end - start
    taken = decides & (before < sequences) & (tokens_before + length <= tokens - kept)
    taken = taken & (rows_before + own_rows <= rows) & (extents_before + own_extents <= extents)
    decided = tl.sum(taken.to(tl.int64), 0)
    decided_tokens = tl.sum(tl.where(taken, length, 0), 0)
    all_rows = tl.sum(tl.where(taken, own_rows, 0), 0)
    decided_extents = tl.sum(tl.where(taken, own_extents, 0), 0)
    left = tl.maximum(tl.minimum(tokens - decided_tokens - prompt_tokens, length), 0)
    given = tl.where(fills, left // span * span, 0)
    reads = fills & (given > 0) & (decided + prompts < sequences)
    reads = reads & (decided_extents + prompt_extents + own_extents <= extents)

    served_now = taken | reads
    place = tl.where(taken, before, decided + prompts)
    last = tl.where(taken, tokens_before + length, decided_tokens + prompt_tokens + given)
    last_row = tl.where(taken, rows_before + own_rows, all_rows)
    last_extent = tl.where(taken, extents_before, decided_extents + prompt_extents) + own_extents
    tl.store(row + place, first + lane, mask=served_now)
    tl.store(begin + place, start.to(tl.int32), mask=served_now)
    tl.store(seen + place, tl.where(reads, start + given, keys).to(tl.int32), mask=served_now)
    tl.store(cu_seqlens + place + 1, last.to(tl.int32), mask=served_now)
    tl.store(cu_rows + place + 1, last_row.to(tl.int32), mask=served_now)
    tl.store(cu_extents + place + 1, last_extent.to(tl.int32), mask=served_now)
    windows = tl.sum(served_now.to(tl.int64), 0)
    all_tokens = decided_tokens + tl.sum(tl.where(reads, given, 0), 0)
    all_extents = decided_extents + tl.sum(tl.where(reads, own_extents, 0), 0)
    for at in range(0, sequences + 1, WINDOWS):
        bound = at + tl.arange(0, WINDOWS)
        free = (bound >= windows) & (bound < sequences)
        tl.store(row + bound, zero_of(bound) - 1, mask=free)
        tl.store(begin + bound, bound * 0, mask=free)
        tl.store(seen + bound, bound * 0, mask=free)
        free = ((bound > windows) & (bound <= sequences)) | (bound == 0)
        tl.store(cu_seqlens + bound, tl.where(bound == 0, 0, all_tokens).to(tl.int32), mask=free)
        tl.store(cu_rows + bound, tl.where(bound == 0, 0, all_rows).to(tl.int32), mask=free)
        tl.store(cu_extents + bound, tl.where(bound == 0, 0, all_extents).to(tl.int32), mask=free)
    tl.debug_barrier()  # every thread has read the turns
    tl.store(line + SERVED, turn + zero, mask=taken & (own_rows > 0))
    there = lane < windows
    sees = tl.load(seen + lane, mask=there, other=1)
    wide = there & (sees == 0)
    if tl.sum(wide.to(tl.int32), 0) > 0:  # those who see no kept keys stand first
        which, first_token = tl.load(row + lane, mask=there, other=0), tl.load(begin + lane, mask=there, other=0)
        number = ends_of(wide, there, tl.where(there, 1, 0))
        token_end = ends_of(wide, there, size_of(cu_seqlens, lane, there))
        row_end = ends_of(wide, there, size_of(cu_rows, lane, there))
        extent_end = ends_of(wide, there, size_of(cu_extents, lane, there))
        tl.debug_barrier()  # every thread has read its window
        tl.store(row + number - 1, which, mask=there)
        tl.store(begin + number - 1, first_token, mask=there)
        tl.store(seen + number - 1, sees, mask=there)
        tl.store(cu_seqlens + number, token_end, mask=there)
        tl.store(cu_rows + number, row_end, mask=there)
        tl.store(cu_extents + number, extent_end, mask=there)


@triton.jit
def size_of(bounds, window, there):
    return tl.load(bounds + window + 1, mask=there, other=0) - tl.load(bounds + window, mask=there, other=0)


@triton.jit
def ends_of(wide, there, sizes):
    """Where windows of some sizes end, if the wide ones stand first."""
    first, others = tl.where(wide, sizes, 0), tl.where(there & (wide == 0), sizes, 0)
    return tl.where(wide, tl.cumsum(first, 0), tl.sum(first, 0) + tl.cumsum(others, 0))


@triton.jit
def zero_of(bound):
    return bound.to(tl.int64) * 0


def launch(
    *, table: Tensor, room: Tensor, row: Tensor, begin: Tensor, seen: Tensor, cu_seqlens: Tensor, cu_rows: Tensor,
    cu_extents: Tensor, sequences: int = 0, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Update SERVED in the table, and write all outputs."""
    lanes = power_of_two(table.shape[0], MOST, 16)
    pack_requests_kernel[(1,)](
        table, room, row, begin, seen, cu_seqlens, cu_rows, cu_extents, row.shape[0],
        PATIENCE=PATIENCE, KEPT_SHARE=KEPT_SHARE, TOGETHER=TOGETHER, LANES=lanes, COMPARED=min(lanes, AT_ONCE // lanes),
        WINDOWS=64, num_warps=min(max(lanes // 32, 4), 16),
    )  # fmt: skip
