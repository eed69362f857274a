"""token_importance on CUDA: the attention of each sequence's voting rows to the positions of its block, per KV head.

One program a sequence and KV head, over tiles of tokens times query heads. Scores are computed once for each neighbour of the
pool, of keys that are listed so far apart: a block is short, and so no score has to be moved between threads. Nothing is read
on the host. Legend: T rows, R rows of the state, L layers, B sequences, X extents, N query heads, K KV heads, H size, P
positions of a block.
"""

import math
from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import DOT_MINIMUM, power_of_two, tl, triton

# Untuned defaults: rows times query heads of a tile.
ROWS: Final = 32
WARPS: Final = 4


@triton.jit
def places_of(offset, begin, extents, low, high, kv_stride, column_head, SIZE: tl.constexpr):
    """Where keys at offsets from a position lie in the state, in elements."""
    position = begin + offset
    place = offset.to(tl.int64) * 0
    for extent in range(low, high):
        entry = extents + extent * 4
        start = tl.load(entry + 2)
        origin = column_head * tl.load(entry + 1) + tl.load(entry + 3) - start
        place = tl.where(position >= start, tl.load(entry) * kv_stride + (origin + position) * SIZE, place)
    return place


@triton.jit(do_not_specialize=["layer"])
def importance_kernel(
    q,
    kv,
    extents,
    cu_extents,
    cu_seqlens,
    votes,
    first,
    listed,
    importance,
    q_stride,
    kv_stride,
    layer,
    scale_log2,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    POSITIONS: tl.constexpr,
    REACH: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    begin = tl.load(first + sequence)
    low = tl.load(cu_extents + sequence)
    high = tl.load(cu_extents + sequence + 1)
    mine = listed + sequence * POSITIONS
    index = tl.arange(0, BLOCK_K)
    column = tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_K], tl.float32)
    end = tl.load(cu_seqlens + sequence + 1) * GROUP
    for start in range(tl.load(cu_seqlens + sequence) * GROUP, end, BLOCK_Q):
        at = start + tl.arange(0, BLOCK_Q)
        row = at // GROUP
        says = tl.load(votes + row, mask=at < end, other=0) != 0
        place = row.to(tl.int64) * q_stride + (head * GROUP + at % GROUP) * SIZE
        queries = tl.load(
            q + place[:, None] + column[None, :], mask=says[:, None] & (column < SIZE)[None, :], other=0.0
        )
        pooled = tl.full([BLOCK_Q, BLOCK_K], float("-inf"), tl.float32)
        for shift in tl.static_range(-REACH, REACH + 1):
            near = index + shift
            other = tl.load(mine + near, mask=(near >= 0) & (near < POSITIONS), other=-1)
            there = other >= 0
            keys = kv + places_of(other, begin, extents, low, high, kv_stride, 2 * layer * HEADS + head, SIZE)
            k_tile = tl.load(keys[None, :] + column[:, None], mask=there[None, :] & (column < SIZE)[:, None], other=0.0)
            scores = tl.dot(queries, k_tile, input_precision="ieee") * scale_log2
            pooled = tl.maximum(pooled, tl.where(there[None, :], scores, float("-inf")))
        offset = tl.load(mine + index, mask=index < POSITIONS, other=-1)  # held through the loop, it went to the stack
        pooled = tl.where((offset >= 0)[None, :], pooled, float("-inf"))
        maximum = tl.max(pooled, 1)
        weights = tl.exp2(pooled - tl.where(maximum == float("-inf"), 0.0, maximum)[:, None])
        share = tl.where(says, 1.0, 0.0) / tl.maximum(tl.sum(weights, 1), 1.0)  # the largest weight is 1
        total += tl.sum(weights * share[:, None], 0)
    offset = tl.load(mine + index, mask=index < POSITIONS, other=-1)
    found = tl.sum(tl.where(offset[:, None] == index[None, :], total[:, None], 0.0), 0)
    tl.store(importance + (sequence * HEADS + head) * POSITIONS + index, found, mask=index < POSITIONS)


def launch(
    *, q: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, cu_seqlens: Tensor, votes: Tensor, first: Tensor,
    listed: Tensor, importance: Tensor, layer: int, kv_heads: int, head_size: int, scale: float, pool: int = 3,
    scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the importance of each sequence's positions, [B, K, P]."""
    group = q.shape[1] // (kv_heads * head_size)
    sequences, positions = listed.shape
    importance_kernel[(kv_heads, sequences)](
        q,
        kv,
        extents,
        cu_extents,
        cu_seqlens,
        votes,
        first,
        listed,
        importance,
        q.stride(0),
        kv.stride(0),
        layer,
        scale / math.log(2),
        HEADS=kv_heads,
        GROUP=group,
        SIZE=head_size,
        POSITIONS=positions,
        REACH=min(pool // 2, positions - 1),
        BLOCK_Q=ROWS,
        BLOCK_K=power_of_two(positions, 1 << 16, least=DOT_MINIMUM),
        BLOCK_H=power_of_two(head_size, 1 << 16, least=DOT_MINIMUM),
        num_warps=WARPS,
    )
