"""prefix_logsumexp on CUDA: over the prefix of each voting row, the logarithm of what the exponentials of its scores add up to.

Contract: prefix_logsumexp(q[T, N*H], kv[R, L*2*K*H], extents[X, 4] int64, cu_extents[B+1] int32, captured[B] int32, votes[T] uint8,
cu_seqlens[B+1] int32; layer, kv_heads, head_size, scale, span, keys) -> logsumexp[T, N] float32, all whole, as
`mosaic.registrar.operators.prefix_logsumexp` says. A tile's rows are tokens of one sequence times the query heads of one KV head,
as in `kv_attention`. Where the tiles are few, they are split over keys, and the splits, in scratch, are then joined. Lengths are
read on the device alone: how many programs start depends on shapes, so a captured launch serves other lengths. Legend: T rows, R
rows of the state, L layers, B sequences, X extents, N query heads, K KV heads, H size.
"""

from __future__ import annotations

import math
from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.kv_attention import SEQUENCES, cut_of, find_tile, floats_of, share_of
from mosaic.kernels.cuda.shared.launching import DOT_MINIMUM, power_of_two, processors, tl, triton
from mosaic.kernels.prefix_logsumexp import check, reference
from mosaic.registrar.operators.prefix_logsumexp import SPLIT_KEYS, splits_of

__all__ = ["launch", "reference"]

PLACES: Final = 2
"""Programs that a multiprocessor runs at a time."""
JOINED: Final = 256
"""Log-sum-exps that a program joins the splits of."""
JOIN_WARPS: Final = 4
LN_2: Final = tl.constexpr(math.log(2))


@triton.jit(do_not_specialize=["rows", "sequences", "splits", "layer"])
def log_sum_kernel(
    q,
    kv,
    extents,
    cu_extents,
    captured,
    votes,
    cu_seqlens,
    sums,
    q_stride,
    kv_stride,
    sums_stride,
    rows,
    sequences,
    splits,
    layer,
    scale_log2,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PART: tl.constexpr,
    SIZE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Log-sum-exp of the scores of a tile's voting rows with one split of their prefix; -inf where that has no key."""
    PARTS: tl.constexpr = (GROUP + PART - 1) // PART
    TOKENS: tl.constexpr = BLOCK_Q // PART
    kv_head = tl.program_id(1) // PARTS
    first, last, sequence = find_tile(tl.program_id(0), cu_seqlens, sequences, 0, rows, TOKENS, SEQUENCES)
    index = tl.arange(0, BLOCK_Q)
    row = first + index // PART
    member = tl.program_id(1) % PARTS * PART + index % PART
    here = (index < TOKENS * PART) & (member < GROUP) & (row < last)
    says = tl.load(votes + row, mask=here, other=0) != 0
    keys = tl.where(tl.max(says.to(tl.int32), 0) > 0, tl.load(captured + sequence), 0)
    low = tl.program_id(2) * share_of(keys, splits, BLOCK_K, LEAST)
    high = tl.minimum(keys, low + share_of(keys, splits, BLOCK_K, LEAST))
    column = tl.arange(0, BLOCK_H)
    head = kv_head * GROUP + member
    place = row.to(tl.int64)[:, None] * q_stride + (head * SIZE)[:, None] + column[None, :]
    queries = tl.load(q + place, mask=says[:, None] & (column < SIZE)[None, :], other=0.0)
    key = tl.arange(0, BLOCK_K)
    maximum = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    last_extent = tl.load(cu_extents + sequence + 1)
    for extent in range(tl.load(cu_extents + sequence), last_extent):
        entry = extents + extent * 4
        begin = tl.load(entry + 2).to(tl.int32)
        end = tl.load(entry + 6, mask=extent + 1 < last_extent, other=2147483647).to(tl.int32)
        # where the key of position 0 would lie, were the extent to reach there
        origin = (2 * layer * HEADS + kv_head) * tl.load(entry + 1) + tl.load(entry + 3) - begin
        k = kv + tl.load(entry) * kv_stride + origin * SIZE
        stop = tl.minimum(end, high)
        for step in range(tl.maximum(begin, low), stop, BLOCK_K):
            there = step + key < stop
            k_mask = there[None, :] & (column < SIZE)[:, None]
            k_tile = tl.load(k + ((step + key) * SIZE)[None, :] + column[:, None], mask=k_mask, other=0.0)
            scores = tl.dot(queries, k_tile, input_precision="ieee") * scale_log2
            scores = tl.where(there[None, :], scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, 1))  # a key is there, so it is finite
            total = total * tl.exp2(maximum - new_maximum) + tl.sum(tl.exp2(scores - new_maximum[:, None]), 1)
            maximum = new_maximum
    place = (tl.program_id(2) * rows + row) * sums_stride + head
    tl.store(sums + place, (maximum + tl.log2(tl.where(total > 0.0, total, 1.0))) * LN_2, mask=here)


@triton.jit(do_not_specialize=["count", "splits"])
def join_sums_kernel(sums, logsumexp, stride, count, splits, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Log-sum-exp of all splits."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    maximum = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(0, splits):
        some = tl.load(sums + split * count + at, mask=at < count, other=float("-inf"))
        new_maximum = tl.maximum(maximum, some)
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        total = total * tl.exp(maximum - base) + tl.exp(some - base)
        maximum = new_maximum
    found = maximum + tl.log(tl.where(total > 0.0, total, 1.0))
    tl.store(logsumexp + at // HEADS * stride + at % HEADS, found, mask=at < count)


def launch(
    *,
    q: Tensor,
    kv: Tensor,
    extents: Tensor,
    cu_extents: Tensor,
    captured: Tensor,
    votes: Tensor,
    cu_seqlens: Tensor,
    logsumexp: Tensor,
    layer: int,
    kv_heads: int,
    head_size: int,
    scale: float,
    span: int = 0,
    keys: int = 0,
    scratch: Tensor | None = None,
) -> None:
    """Write the log-sum-exps of voting rows into logsumexp [T, N]."""
    group = check(q, kv, extents, cu_extents, captured, votes, cu_seqlens, logsumexp, layer, kv_heads, head_size)
    (rows, heads), sequences = logsumexp.shape, cu_seqlens.shape[0] - 1
    tile, part, tiles, parts = cut_of(q, sequences, group, kv_heads, head_size)
    splits = splits_of(tiles * parts, rows * heads, kv.shape[0], processors(q.device) * PLACES)
    sums = floats_of("prefix_logsumexp", scratch, splits * rows * heads) if splits > 1 else logsumexp
    log_sum_kernel[(tiles, parts, splits)](
        q,
        kv,
        extents,
        cu_extents,
        captured,
        votes,
        cu_seqlens,
        sums,
        q.stride(0),
        kv.stride(0),
        heads if splits > 1 else logsumexp.stride(0),
        rows,
        sequences,
        splits,
        layer,
        scale / math.log(2),
        HEADS=kv_heads,
        GROUP=group,
        PART=part,
        SIZE=head_size,
        SEQUENCES=power_of_two(sequences, 1 << 16, least=SEQUENCES),
        LEAST=SPLIT_KEYS,
        BLOCK_Q=tile.rows,
        BLOCK_K=tile.columns,
        BLOCK_H=power_of_two(head_size, 1 << 16, least=DOT_MINIMUM),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        count = rows * heads
        join_sums_kernel[(triton.cdiv(count, JOINED),)](
            sums, logsumexp, logsumexp.stride(0), count, splits, HEADS=heads, BLOCK=JOINED, num_warps=JOIN_WARPS
        )
