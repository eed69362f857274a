"""joined_attention on CUDA: attention to a block's own keys, merged with a fresh or kept output over its prefix.

A tile is that of `kv_attention`. Its online softmax begins with what is given: the output over the prefix, as the sum of one
exponential whose exponent is the log-sum-exp. A block's own keys are few, so no sequence is split. Legend: T query rows, R
rows, L layers, B sequences, X extents, E and S rows of states, Z slots, M rows of a block, N query heads, K KV heads, H size.
"""

import math
from functools import partial

from torch import Tensor

from mosaic.kernels.cuda.kv_attention import attend_tile, cut_of
from mosaic.kernels.cuda.shared.launching import DOT_MINIMUM, power_of_two, tl, triton
from mosaic.kernels.cuda.shared.sequences import SEQUENCES, find_tile


@triton.jit(do_not_specialize=["rows", "sequences", "layer", "slot"])
def joined_attention_kernel(
    q,
    kv,
    extents,
    cu_extents,
    seen,
    cu_seqlens,
    positions,
    prefix,
    kept,
    kept_sums,
    owner,
    fresh,
    fresh_sums,
    refreshed,
    y,
    q_stride,
    kv_stride,
    kept_stride,
    kept_sums_stride,
    fresh_stride,
    fresh_sums_stride,
    y_stride,
    rows,
    sequences,
    layer,
    slot,
    scale_log2,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PART: tl.constexpr,
    SIZE: tl.constexpr,
    KEPT: tl.constexpr,
    SEEN: tl.constexpr,
    HELD: tl.constexpr,
    FRESH: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    PARTS: tl.constexpr = (GROUP + PART - 1) // PART
    TOKENS: tl.constexpr = BLOCK_Q // PART
    kv_head = tl.program_id(1) // PARTS
    first, last, number = find_tile(tl.program_id(0), cu_seqlens, sequences, 0, rows, TOKENS, SEQUENCES)
    if first >= last:
        return
    keys = tl.load(seen + number)
    before = tl.load(prefix + number)
    index = tl.arange(0, BLOCK_Q)
    row = first + index // PART
    member = tl.program_id(1) % PARTS * PART + index % PART
    here = (index < TOKENS * PART) & (member < GROUP) & (row < last)
    position = tl.load(positions + row, mask=here, other=0)
    limit = tl.where(here, keys, 0)
    if SEEN:
        limit = tl.minimum(limit, (position // SEEN + 1) * SEEN)
    high = tl.max(limit, 0)

    column = tl.arange(0, BLOCK_H)
    inside = (column < SIZE)[None, :]
    mask = here[:, None] & inside
    head = kv_head * GROUP + member
    at = row.to(tl.int64)
    queries = tl.load(q + at[:, None] * q_stride + (head * SIZE)[:, None] + column[None, :], mask=mask, other=0.0)

    # the given output over the keys before the block
    known = here & (before > 0)
    old = known
    place = (slot * KEPT + position - before) * (HEADS * GROUP) + head
    mine = tl.load(owner + number)
    outputs = kept + mine * kept_stride + place.to(tl.int64)[:, None] * SIZE + column[None, :]
    sums = kept_sums + mine * kept_sums_stride + place
    if FRESH:
        new = tl.load(refreshed + number) != 0
        old = known & (new == 0)
        given = known & new
        fresh_place = at[:, None] * fresh_stride + (head * SIZE)[:, None] + column[None, :]
        output = tl.load(fresh + fresh_place, mask=given[:, None] & inside, other=0.0)
        log_sum = tl.load(fresh_sums + at * fresh_sums_stride + head, mask=given, other=0.0)
        stays = given & (position >= before)
        if HELD:
            tl.store(outputs, output, mask=stays[:, None] & inside)
            tl.store(sums, log_sum, mask=stays)
            output = tl.where(old[:, None], tl.load(outputs, mask=old[:, None] & inside, other=0.0), output)
            log_sum = tl.where(old, tl.load(sums, mask=old, other=0.0), log_sum)
        accumulator = output.to(tl.float32)
    else:
        accumulator = tl.load(outputs, mask=old[:, None] & inside, other=0.0).to(tl.float32)
        log_sum = tl.load(sums, mask=old, other=0.0)
    maximum = tl.where(known, log_sum * 1.4426950408889634, float("-inf"))
    total = tl.where(known, 1.0, 0.0)

    key = tl.arange(0, BLOCK_K)
    first_extent = tl.load(cu_extents + number)
    last_extent = tl.load(cu_extents + number + 1)
    for extent in range(first_extent, last_extent):
        entry = extents + extent * 4
        count = tl.load(entry + 1)
        begin = tl.load(entry + 2).to(tl.int32)
        end = tl.load(entry + 6, mask=extent + 1 < last_extent, other=2147483647).to(tl.int32)
        # where the key of position 0 would lie if the extent reached there
        origin = tl.load(entry + 3) - begin
        k = kv + tl.load(entry) * kv_stride + ((2 * layer * HEADS + kv_head) * count + origin) * SIZE
        v = k + HEADS * count * SIZE
        stop = tl.minimum(end, high)
        for step in range(tl.maximum(begin, before), stop, BLOCK_K):
            offset = ((step + key) * SIZE)[:, None] + column[None, :]
            there = (step + key < stop)[:, None] & inside
            k_tile = tl.load(k + offset, mask=there, other=0.0)
            v_tile = tl.load(v + offset, mask=there, other=0.0)
            keep = (step + key < stop)[None, :] & (step + key[None, :] < limit[:, None])
            maximum, total, accumulator = attend_tile(
                queries, k_tile, v_tile, keep, scale_log2, maximum, total, accumulator, MASKED=True
            )
    sees = total > 0
    result = accumulator / tl.where(sees, total, 1.0)[:, None]
    # y may be q: this program alone reads these rows of these heads, and has read them
    written = y + at[:, None] * y_stride + (head * SIZE)[:, None] + column[None, :]
    tl.store(written, result.to(y.dtype.element_ty), mask=mask & sees[:, None])


def launch(
    *, q: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, seen: Tensor, cu_seqlens: Tensor, positions: Tensor,
    prefix: Tensor, y: Tensor, layer: int, slot: int, rows: int, kv_heads: int, head_size: int, scale: float, block: int = 0,
    kept: Tensor | None = None, kept_sums: Tensor | None = None, owner: Tensor | None = None, fresh: Tensor | None = None,
    fresh_sums: Tensor | None = None, refreshed: Tensor | None = None, scratch: Tensor | None = None,
    fixed: bool = False,
) -> None:  # fmt: skip
    """Write the attention of the query rows into y [T, N*H], and keep what is fresh; y may be q itself.

    `fixed` takes tiles that give a row the same bits, however many rows there are.
    """
    group = q.shape[1] // (kv_heads * head_size)
    sequences = cu_seqlens.shape[0] - 1
    tile, part, tiles, heads = cut_of(q, sequences, group, kv_heads, head_size, fixed=fixed)
    # absent operands are not read
    states = (q, q) if kept is None or kept_sums is None else (kept, kept_sums)
    new = (q, q) if fresh is None or fresh_sums is None else (fresh, fresh_sums)
    joined_attention_kernel[(tiles, heads)](
        q,
        kv,
        extents,
        cu_extents,
        seen,
        cu_seqlens,
        positions,
        prefix,
        *states,
        prefix if owner is None else owner,
        *new,
        prefix if refreshed is None else refreshed,
        y,
        q.stride(0),
        kv.stride(0),
        *(tensor.stride(0) for tensor in (*states, *new)),
        y.stride(0),
        q.shape[0],
        sequences,
        layer,
        slot,
        scale / math.log(2),
        HEADS=kv_heads,
        GROUP=group,
        PART=part,
        SIZE=head_size,
        KEPT=rows,
        SEEN=block,
        HELD=kept is not None,
        FRESH=fresh is not None,
        SEQUENCES=power_of_two(sequences, 1 << 16, least=SEQUENCES),
        BLOCK_Q=tile.rows,
        BLOCK_K=min(tile.columns, power_of_two(rows, 64, least=DOT_MINIMUM)),
        BLOCK_H=power_of_two(head_size, 1 << 16, least=DOT_MINIMUM),
        num_warps=tile.warps,
        num_stages=1,
    )


launch_invariant = partial(launch, fixed=True)
