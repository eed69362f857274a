"""Attention over kept keys on Hopper: the copy engine brings tiles while two warpgroups multiply, each overlapped with its softmax.

The same launch as `kv_attention_kernel` (mosaic.kernels.cuda.kv_attention), for tiles of 128 query rows in bfloat16; smaller ones,
and rows that are told which keys they see, have the plain kernel. One warp reads tiles of keys and values into a ring in shared
memory, by descriptor: a line is the key or value of one token and head. Tiles that are not whole it copies line by line, as what
lies behind the last key need not be mapped. Two warpgroups have 64 rows each. A warpgroup starts the products of the next tile's
scores and of this tile's values, and computes the softmax of the next tile while the tensor cores work (FlashAttention-3, Shah et
al. 2024, section 3.2). Written in Gluon, whose interface changes between versions of Triton: this module loads with Triton 3.6
alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from torch import Tensor

from mosaic.errors import UsageError
from mosaic.kernels.cuda import kv_attention
from mosaic.kernels.cuda.shared.launching import triton

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if not triton.__version__.startswith("3.6."):
        raise ImportError
except ImportError:
    raise UsageError(
        f"the kernel for Hopper of attention over kept keys is written for Triton 3.6, and {triton.__version__} is installed."
    ) from None

__all__ = ["launch", "launch_invariant"]

KEYS: Final = 64
"""Keys of a tile."""
STAGES: Final = 4
"""Tiles of keys, and as many of values, that the ring has room for."""


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def _of_one(values, sequence, number):
    return gl.sum(gl.where(sequence == number, values, 0), 0)


@gluon.jit
def _segments(
    window, keys,
    SEGMENTS: gl.constexpr, SEGMENT_KEYS: gl.constexpr, SEGMENT_TOKENS: gl.constexpr, ALIGNED: gl.constexpr,
):  # fmt: skip
    """Of windows and their keys: the keys of a segment, how many segments there are, and the rows of their results."""
    wanted = gl.minimum(gl.maximum(SEGMENT_TOKENS // gl.maximum(window, 1), 1), SEGMENTS)
    wanted = gl.minimum(wanted, gl.maximum(gl.cdiv(keys, SEGMENT_KEYS), 1))
    share = gl.maximum(gl.cdiv(gl.cdiv(keys, wanted), ALIGNED) * ALIGNED, ALIGNED)
    count = gl.maximum(gl.cdiv(keys, share), 1)
    return share, count, gl.where(count > 1, window * count, 0)


@gluon.jit
def _schedule(
    cu_seqlens, seen, sequences, capacity, row_start, rows,
    TOKENS: gl.constexpr, SEQUENCES: gl.constexpr, SEGMENTS: gl.constexpr, SEGMENT_KEYS: gl.constexpr,
    SEGMENT_TOKENS: gl.constexpr, ALIGNED: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """What this program does: `find_tile` and `segments_of` of the plain kernel, for its own tile.

    With one sequence nothing is looked for, so that what is loaded next need not wait.
    """
    tile = gl.program_id(0)
    if SEQUENCES == 1:
        number = tile * 0
        from_row = gl.load(cu_seqlens)
        to_row = gl.load(cu_seqlens + 1)
        keys = gl.load(seen)
        start = gl.maximum(from_row - row_start, 0) + tile * TOKENS
        end = gl.minimum(to_row - row_start, rows)
        first = gl.where(start < end, start, 0)
        last = gl.where(start < end, end, 0)
        window = to_row - from_row
        share, count, parts = _segments(window, keys, SEGMENTS, SEGMENT_KEYS, SEGMENT_TOKENS, ALIGNED)
        begin_part = gl.where((parts > 0) & (parts <= capacity), 0, -1)
    else:
        L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        sequence = gl.arange(0, SEQUENCES, L)
        known = sequence < sequences
        from_rows = gl.load(cu_seqlens + sequence, mask=known, other=0)
        to_rows = gl.load(cu_seqlens + sequence + 1, mask=known, other=0)
        all_keys = gl.load(seen + sequence, mask=known, other=0)
        start = gl.maximum(from_rows - row_start, 0)
        end = gl.minimum(to_rows - row_start, rows)
        tiles = gl.where(known & (end > start), (end - start + TOKENS - 1) // TOKENS, 0)
        before = gl.associative_scan(tiles, 0, _plus) - tiles
        mine = (tile >= before) & (tile < before + tiles)
        first = gl.sum(gl.where(mine, start + (tile - before) * TOKENS, 0), 0)
        last = gl.sum(gl.where(mine, end, 0), 0)
        number = gl.sum(gl.where(mine, sequence, 0), 0)
        windows = to_rows - from_rows
        shares, counts, all_parts = _segments(windows, all_keys, SEGMENTS, SEGMENT_KEYS, SEGMENT_TOKENS, ALIGNED)
        room = gl.associative_scan(all_parts, 0, _plus)
        begin = gl.where((all_parts > 0) & (room <= capacity), room - all_parts, -1)
        begin_part = _of_one(begin, sequence, number)
        window = _of_one(windows, sequence, number)
        share = _of_one(shares, sequence, number)
        count = _of_one(counts, sequence, number)
        keys = _of_one(all_keys, sequence, number)
        from_row = _of_one(from_rows, sequence, number)
    segments = gl.where(last > first, count, 0)
    segment = 0
    if SPLIT:
        segment = gl.program_id(2)
        segments = gl.minimum(segments, gl.where(begin_part >= 0, segment + 1, gl.where(segment == 0, SEGMENTS, 0)))
    return first, last, number, keys, share, segment, segments, begin_part, window, from_row


@gluon.jit
def _run_of(extents, extent, last_extent, segment, share, high, layer, kv_head, line_stride, HEADS: gl.constexpr):
    """Of the keys of a segment those in one extent: the first, the end, the lines of position 0, and those of a head."""
    entry = extents + extent * 4
    count = gl.load(entry + 1).to(gl.int32)
    begin = gl.load(entry + 2).to(gl.int32)
    end = gl.load(entry + 6, mask=extent + 1 < last_extent, other=2147483647).to(gl.int32)
    # where the key of position 0 would lie, were the extent to reach there
    origin = gl.load(entry + 3).to(gl.int32) - begin
    line = gl.load(entry).to(gl.int32) * line_stride + (2 * layer * HEADS + kv_head) * count + origin
    start = gl.maximum(begin, segment * share)
    stop = gl.maximum(gl.minimum(gl.minimum(end, (segment + 1) * share), high), start)
    return start, stop, line, HEADS * count


@gluon.jit
def _copy_lines(kv, place, line, valid, BLOCK_K: gl.constexpr, SIZE: gl.constexpr):
    """Start to copy `valid` lines from `line` on, and zeros behind them."""
    CHUNK: gl.constexpr = 8
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SIZE, SIZE // 8], [1, 1], [1, 0])
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, L))
    column = gl.arange(0, SIZE, gl.SliceLayout(0, L))
    for chunk in gl.static_range(BLOCK_K // CHUNK):
        at = kv + (line + chunk * CHUNK).to(gl.int64) * SIZE
        there = (row + chunk * CHUNK < valid)[:, None] & (column < SIZE)[None, :]
        async_copy.async_copy_global_to_shared(
            place.slice(chunk * CHUNK, CHUNK), at + row[:, None] * SIZE + column[None, :], mask=there
        )


@gluon.jit
def _load(
    lines, kv, k_ring, v_ring, k_full, k_free, v_full, v_free, extents, first_extent, last_extent, segment, segments, share,
    high, layer, kv_head, line_stride,
    HEADS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SIZE: gl.constexpr,
):  # fmt: skip
    """The warp that reads: all tiles of this program's segments, in order, each where the ring is free."""
    number = segment * 0
    while segment < segments:
        for extent in range(first_extent, last_extent):
            start, stop, line, to_values = _run_of(
                extents, extent, last_extent, segment, share, high, layer, kv_head, line_stride, HEADS
            )
            for at in range(start, stop, BLOCK_K):
                stage = number % STAGES
                turn = ((number // STAGES) & 1) ^ 1
                key = line + at
                mbarrier.wait(k_free.index(stage), turn)
                if stop - at >= BLOCK_K:
                    mbarrier.expect(k_full.index(stage), BLOCK_K * SIZE * 2)
                    tma.async_copy_global_to_shared(lines, [key, 0], k_full.index(stage), k_ring.index(stage))
                    mbarrier.wait(v_free.index(stage), turn)
                    mbarrier.expect(v_full.index(stage), BLOCK_K * SIZE * 2)
                    tma.async_copy_global_to_shared(
                        lines, [key + to_values, 0], v_full.index(stage), v_ring.index(stage)
                    )
                else:
                    _copy_lines(kv, k_ring.index(stage), key, stop - at, BLOCK_K, SIZE)
                    mbarrier.wait(v_free.index(stage), turn)
                    _copy_lines(kv, v_ring.index(stage), key + to_values, stop - at, BLOCK_K, SIZE)
                    async_copy.commit_group()
                    async_copy.wait_group(0)
                    fence_async_shared()
                    gl.thread_barrier()
                    mbarrier.arrive(k_full.index(stage), count=1)
                    mbarrier.arrive(v_full.index(stage), count=1)
                number += 1
        segment += 1


@gluon.jit
def _scores(
    q_tile, ring, full, number, S: gl.constexpr, ROWS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr
):
    """Start the products with one tile of keys, when it is there."""
    stage = number % STAGES
    mbarrier.wait(full.index(stage), (number // STAGES) & 1)
    zero = gl.zeros([ROWS, BLOCK_K], gl.float32, S)
    return warpgroup_mma(q_tile, ring.index(stage).permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def _softmax(scores, at, low, stop, limit, maximum, total, scale_log2, BLOCK_K: gl.constexpr, S: gl.constexpr):
    """Online softmax over one tile of scores; rows that have seen no key keep the maximum -inf."""
    if at + BLOCK_K > gl.minimum(low, stop):
        key = at + gl.arange(0, BLOCK_K, gl.SliceLayout(0, S))
        scores = gl.where((key < stop)[None, :] & (key[None, :] < limit[:, None]), scores, float("-inf"))
    new_maximum = gl.maximum(maximum, gl.max(scores, 1) * scale_log2)
    # a row that has seen no key yet: any finite base will do, as all its exponentials are 0
    base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = gl.exp2(scores * scale_log2 - base[:, None])
    correction = gl.exp2(maximum - base)
    return weights, correction, new_maximum, total * correction + gl.sum(weights, 1)


@gluon.jit
def _attend(
    q_ring, which, k_ring, v_ring, k_full, k_free, v_full, v_free, extents, first_extent, last_extent, segment, segments,
    share, high, low, layer, kv_head, part_head, line_stride, keys, first, last, positions, y, logsumexp, y_stride,
    sums_stride, partials, begin_part, window, from_row, row_start, capacity, scale_log2,
    HEADS: gl.constexpr, GROUP: gl.constexpr, PART: gl.constexpr, SEEN: gl.constexpr, SPLIT: gl.constexpr,
    SUMS: gl.constexpr, ROWS: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    SIZE: gl.constexpr,
):  # fmt: skip
    """A warpgroup that multiplies: its rows of the tile over all keys of this program's segments."""
    TOKENS: gl.constexpr = BLOCK_Q // PART
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    RS: gl.constexpr = gl.SliceLayout(1, S)
    RA: gl.constexpr = gl.SliceLayout(1, A)
    q_tile = q_ring.slice(which * ROWS, ROWS)
    index = which * ROWS + gl.arange(0, ROWS, RS)
    row = first + index // PART
    member = part_head + index % PART
    here = (index < TOKENS * PART) & (member < GROUP) & (row < last)
    limit = gl.where(here, keys, 0)
    if SEEN:
        position = gl.load(positions + row, mask=here, other=0)
        limit = gl.minimum(limit, (position // SEEN + 1) * SEEN)
    column = gl.arange(0, SIZE, gl.SliceLayout(0, A))
    number = segment * 0
    all_maximum = gl.full([ROWS], float("-inf"), gl.float32, RS)
    all_total = gl.zeros([ROWS], gl.float32, RS)
    all_accumulator = gl.zeros([ROWS, SIZE], gl.float32, A)
    while segment < segments:
        maximum = gl.full([ROWS], float("-inf"), gl.float32, RS)
        total = gl.zeros([ROWS], gl.float32, RS)
        accumulator = gl.zeros([ROWS, SIZE], gl.float32, A)
        for extent in range(first_extent, last_extent):
            start, stop, _line, _to_values = _run_of(
                extents, extent, last_extent, segment, share, high, layer, kv_head, line_stride, HEADS
            )
            if start < stop:
                ahead = _scores(q_tile, k_ring, k_full, number, S, ROWS, BLOCK_K, STAGES)
                scores = warpgroup_mma_wait(0, [ahead])
                mbarrier.arrive(k_free.index(number % STAGES), count=1)
                weights, correction, maximum, total = _softmax(
                    scores, start, low, stop, limit, maximum, total, scale_log2, BLOCK_K, S
                )
                accumulator = accumulator * gl.convert_layout(correction, RA)[:, None]
                p = gl.convert_layout(weights.to(gl.bfloat16), P)
                for at in range(start + BLOCK_K, stop, BLOCK_K):
                    ahead = _scores(q_tile, k_ring, k_full, number + 1, S, ROWS, BLOCK_K, STAGES)
                    mbarrier.wait(v_full.index(number % STAGES), (number // STAGES) & 1)
                    product = warpgroup_mma(p, v_ring.index(number % STAGES), accumulator, is_async=True)
                    scores = warpgroup_mma_wait(1, [ahead, p])[0]
                    mbarrier.arrive(k_free.index((number + 1) % STAGES), count=1)
                    weights, correction, maximum, total = _softmax(
                        scores, at, low, stop, limit, maximum, total, scale_log2, BLOCK_K, S
                    )
                    accumulator = warpgroup_mma_wait(0, [product])
                    mbarrier.arrive(v_free.index(number % STAGES), count=1)
                    accumulator = accumulator * gl.convert_layout(correction, RA)[:, None]
                    p = gl.convert_layout(weights.to(gl.bfloat16), P)
                    number += 1
                mbarrier.wait(v_full.index(number % STAGES), (number // STAGES) & 1)
                accumulator = warpgroup_mma(p, v_ring.index(number % STAGES), accumulator)
                mbarrier.arrive(v_free.index(number % STAGES), count=1)
                number += 1
        if SPLIT and begin_part >= 0:
            token = row + row_start - from_row
            partial = (begin_part + segment * window + token) * (HEADS * GROUP) + kv_head * GROUP + member
            figures = partials + capacity.to(gl.int64) * (HEADS * GROUP * SIZE)
            gl.store(figures + partial, maximum, mask=here)
            gl.store(figures + capacity * (HEADS * GROUP) + partial, total, mask=here)
            place = gl.convert_layout(partial.to(gl.int64) * SIZE, RA)
            mine = gl.convert_layout(here, RA)
            gl.store(partials + place[:, None] + column[None, :], accumulator, mask=mine[:, None])
        else:
            # as `joined` of the plain kernel, to the bit
            new_maximum = gl.maximum(all_maximum, maximum)
            base = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            kept = gl.exp2(all_maximum - base)
            added = gl.exp2(maximum - base)
            all_total = gl.fma(all_total, kept, total * added)
            wide = gl.convert_layout(kept, RA)[:, None] + gl.zeros([ROWS, SIZE], gl.float32, A)
            more = accumulator * gl.convert_layout(added, RA)[:, None]
            all_accumulator = gl.fma(all_accumulator, wide, more)
            all_maximum = new_maximum
        segment += 1
    if begin_part < 0 or not SPLIT:
        sees = all_total > 0
        inverse = gl.convert_layout(gl.where(sees, all_total, 1.0), RA)
        result = all_accumulator / inverse[:, None]
        # y may be q: this program alone reads these rows of these heads, and has read them
        place = gl.convert_layout(row.to(gl.int64) * y_stride + (kv_head * GROUP + member) * SIZE, RA)
        mine = gl.convert_layout(here & sees, RA)
        gl.store(y + place[:, None] + column[None, :], result.to(gl.bfloat16), mask=mine[:, None])
        if SUMS:
            log_sum = (all_maximum + gl.log2(gl.where(sees, all_total, 1.0))) * 0.6931471805599453
            line = row.to(gl.int64) * sums_stride + kv_head * GROUP + member
            gl.store(logsumexp + line, log_sum, mask=here & sees)


@gluon.jit(do_not_specialize=["rows", "row_start", "sequences", "capacity", "layer"])
def kv_attention_tiles_kernel(
    q, kv, lines, extents, cu_extents, seen, cu_seqlens, positions, y, logsumexp, partials, q_stride, line_stride,
    y_stride, sums_stride, rows, row_start, sequences, capacity, layer, scale_log2,
    HEADS: gl.constexpr, GROUP: gl.constexpr, PART: gl.constexpr, SIZE: gl.constexpr, SEEN: gl.constexpr,
    SPLIT: gl.constexpr, SUMS: gl.constexpr, SEQUENCES: gl.constexpr, SEGMENTS: gl.constexpr, SEGMENT_KEYS: gl.constexpr,
    SEGMENT_TOKENS: gl.constexpr, ALIGNED: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = (GROUP + PART - 1) // PART
    TOKENS: gl.constexpr = BLOCK_Q // PART
    ROWS: gl.constexpr = BLOCK_Q // 2
    kv_head = gl.program_id(1) // PARTS
    part_head = gl.program_id(1) % PARTS * PART
    first, last, number, keys, share, segment, segments, begin_part, window, from_row = _schedule(
        cu_seqlens, seen, sequences, capacity, row_start, rows, TOKENS, SEQUENCES, SEGMENTS, SEGMENT_KEYS, SEGMENT_TOKENS,
        ALIGNED, SPLIT,
    )  # fmt: skip
    first_extent = gl.load(cu_extents + number)
    last_extent = gl.load(cu_extents + number + 1)

    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SIZE, SIZE // 8], [4, 1], [1, 0])
    index = gl.arange(0, BLOCK_Q, gl.SliceLayout(1, L))
    column = gl.arange(0, SIZE, gl.SliceLayout(0, L))
    row = first + index // PART
    member = part_head + index % PART
    here = (index < TOKENS * PART) & (member < GROUP) & (row < last) & (segment < segments)
    place = row.to(gl.int64)[:, None] * q_stride + ((kv_head * GROUP + member) * SIZE)[:, None] + column[None, :]
    queries = gl.load(q + place, mask=here[:, None], other=0.0)
    # the keys [0, low) that all rows see, and [0, high) that any does
    limit = gl.where(here, keys, 0)
    if SEEN:
        position = gl.load(positions + row, mask=here, other=0)
        limit = gl.minimum(limit, (position // SEEN + 1) * SEEN)
    low = gl.min(gl.where(here, limit, keys), 0)
    high = gl.max(limit, 0)

    QL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_Q, SIZE], gl.bfloat16)
    KL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, SIZE], gl.bfloat16)
    BL: gl.constexpr = mbarrier.MBarrierLayout()
    q_ring = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_Q, SIZE], QL)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_K, SIZE], KL)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_K, SIZE], KL)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BL)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BL)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BL)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BL)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    q_ring.store(queries)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_attend, (
                q_ring, 0, k_ring, v_ring, k_full, k_free, v_full, v_free, extents, first_extent, last_extent, segment,
                segments, share, high, low, layer, kv_head, part_head, line_stride, keys, first, last, positions, y, logsumexp,
                y_stride, sums_stride, partials, begin_part, window, from_row, row_start, capacity, scale_log2, HEADS, GROUP,
                PART, SEEN, SPLIT, SUMS, ROWS, BLOCK_Q, BLOCK_K, STAGES, SIZE,
            )),
            (_attend, (
                q_ring, 1, k_ring, v_ring, k_full, k_free, v_full, v_free, extents, first_extent, last_extent, segment,
                segments, share, high, low, layer, kv_head, part_head, line_stride, keys, first, last, positions, y, logsumexp,
                y_stride, sums_stride, partials, begin_part, window, from_row, row_start, capacity, scale_log2, HEADS, GROUP,
                PART, SEEN, SPLIT, SUMS, ROWS, BLOCK_Q, BLOCK_K, STAGES, SIZE,
            )),
            (_load, (
                lines, kv, k_ring, v_ring, k_full, k_free, v_full, v_free, extents, first_extent, last_extent, segment,
                segments, share, high, layer, kv_head, line_stride, HEADS, BLOCK_K, STAGES, SIZE,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def launch_tiles(
    grid: tuple[int, int, int], q: Tensor, kv: Tensor, operands: tuple[Any, ...], sizes: tuple[Any, ...],
    constants: Mapping[str, int],
) -> None:  # fmt: skip
    """Launch the kernel over tiles, with the operands, sizes and constants of the plain one."""
    size, alone = constants["SIZE"], {"SEQUENCES": 1} if sizes[4] == 1 else {}
    layout = gl.NVMMASharedLayout.get_default_for([KEYS, size], gl.bfloat16)
    lines = kv.view(-1, size)
    described = TensorDescriptor(lines, list(lines.shape), list(lines.stride()), [KEYS, size], layout)
    kv_attention_tiles_kernel[grid](
        q, kv, described, *operands, kv.stride(0) // size, *sizes, **{**constants, "BLOCK_K": KEYS, **alone}, STAGES=STAGES,
        num_warps=4,
    )  # fmt: skip


launch = partial(kv_attention.launch, large=launch_tiles)
launch_invariant = partial(kv_attention.launch_invariant, large=launch_tiles)
