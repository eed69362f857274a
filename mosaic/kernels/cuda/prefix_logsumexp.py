"""prefix_logsumexp on CUDA: the log-sum-exp of each voting row's scores over its prefix.

A tile's rows are tokens of one sequence times the query heads of one KV head, as in `kv_attention`. The splits of the
keys depend on the request alone; their results, in scratch, are then joined. Lengths are read on the device alone: the
number of programs depends on shapes, so a captured launch serves other lengths. Legend: T rows, R rows of the state, L
layers, B sequences, X extents, N query heads, K KV heads, H size.
"""

import math
import sys
from functools import partial
from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.key_mass import tile_of
from mosaic.kernels.cuda.shared.launching import DOT_MINIMUM, power_of_two, tl, triton
from mosaic.kernels.cuda.shared.scratch import floats_of
from mosaic.kernels.cuda.shared.sequences import SEQUENCES, find_tile, share_of
from mosaic.registrar.operators.prefix_logsumexp import SPLIT_KEYS, SPLITS

JOINED: Final = 64
"""Log-sum-exps that a program joins the splits of."""
JOIN_WARPS: Final = 4
LN_2: Final = tl.constexpr(math.log(2))
LEAST_SUM: Final = tl.constexpr(2.0**-64)
ATTEMPTS: Final = tl.constexpr(64)  # scores of up to 4,400 either way; infinite ones have no sum


@triton.jit(do_not_specialize=["rows", "sequences", "layer"])
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
    rows,
    sequences,
    layer,
    scale_log2,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PART: tl.constexpr,
    SIZE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    SPLITS: tl.constexpr,
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
    low = tl.program_id(2) * share_of(keys, SPLITS, BLOCK_K, LEAST)
    high = tl.minimum(keys, low + share_of(keys, SPLITS, BLOCK_K, LEAST))
    column = tl.arange(0, BLOCK_H)
    head = kv_head * GROUP + member
    place = row.to(tl.int64)[:, None] * q_stride + (head * SIZE)[:, None] + column[None, :]
    queries = tl.trans(tl.load(q + place, mask=says[:, None] & (column < SIZE)[None, :], other=0.0))
    key = tl.arange(0, BLOCK_K)
    first_extent = tl.load(cu_extents + sequence)
    last_extent = tl.load(cu_extents + sequence + 1)
    # what a row's exponentials are taken relative to: again, where they add up to too much or too little
    base = tl.zeros([BLOCK_Q], tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    attempts = tl.where(low < high, ATTEMPTS, 0)
    while attempts > 0:
        # keys are the rows of the product, and each thread adds up its own
        totals = tl.zeros([BLOCK_K, BLOCK_Q], tl.float32)
        for extent in range(first_extent, last_extent):
            entry = extents + extent * 4
            begin = tl.load(entry + 2).to(tl.int32)
            end = tl.load(entry + 6, mask=extent + 1 < last_extent, other=2147483647).to(tl.int32)
            # where the key of position 0 would lie if the extent reached there
            origin = (2 * layer * HEADS + kv_head) * tl.load(entry + 1) + tl.load(entry + 3) - begin
            k = kv + tl.load(entry) * kv_stride + origin * SIZE
            start = tl.maximum(begin, low)
            stop = tl.minimum(end, high)
            for step in range(start, stop, BLOCK_K):
                there = step + key < stop
                k_mask = there[:, None] & (column < SIZE)[None, :]
                k_tile = tl.load(k + ((step + key) * SIZE)[:, None] + column[None, :], mask=k_mask, other=0.0)
                scores = tl.dot(k_tile, queries, input_precision="ieee")
                weights = tl.exp2(scores * scale_log2 - base[None, :])
                totals += tl.where(there[:, None], weights, 0.0)
        total = tl.sum(totals, 0)
        change = tl.where(total == float("inf"), 100.0, tl.where(total < LEAST_SUM, -100.0, 0.0))
        base += change
        attempts = tl.where(tl.max(tl.abs(change), 0) > 0.0, attempts - 1, 0)
    place = (tl.program_id(2) * rows + row) * (HEADS * GROUP) + head
    found = tl.where(total > 0.0, base + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
    tl.store(sums + place, found * LN_2, mask=here)


@triton.jit(do_not_specialize=["count"])
def join_sums_kernel(sums, logsumexp, stride, count, HEADS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Log-sum-exp of all splits."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    split = tl.arange(0, SPLITS)
    some = tl.load(sums + split[:, None] * count + at[None, :], mask=(at < count)[None, :], other=float("-inf"))
    some = tl.where(some == some, some, float("-inf"))  # rows in no sequence are unwritten
    maximum = tl.max(some, 0)
    base = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.sum(tl.exp(some - base[None, :]), 0)
    found = base + tl.log(tl.where(total > 0.0, total, 1.0))
    tl.store(logsumexp + at // HEADS * stride + at % HEADS, found, mask=at < count)


def launch(
    *, q: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, captured: Tensor, votes: Tensor, cu_seqlens: Tensor,
    logsumexp: Tensor, layer: int, kv_heads: int, head_size: int, scale: float, span: int = 0, keys: int = 0,
    scratch: Tensor | None = None, fixed: bool = False,
) -> None:  # fmt: skip
    """Write the log-sum-exps of voting rows into logsumexp [T, N]; `fixed`: with the same tiles, however many rows there are."""
    group = q.shape[1] // (kv_heads * head_size)
    (rows, heads), sequences = logsumexp.shape, cu_seqlens.shape[0] - 1
    tile = tile_of(q, head_size, sys.maxsize if fixed else -(-rows // sequences) * group)
    part = min(group, tile.rows)
    tokens = tile.rows // part
    tiles, parts = (rows + sequences * (tokens - 1)) // tokens, kv_heads * -(-group // part)
    count = rows * heads
    sums = floats_of("prefix_logsumexp", scratch, SPLITS * count)
    log_sum_kernel[(tiles, parts, SPLITS)](
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
        rows,
        sequences,
        layer,
        scale / math.log(2),
        HEADS=kv_heads,
        GROUP=group,
        PART=part,
        SIZE=head_size,
        SEQUENCES=power_of_two(sequences, 1 << 16, least=SEQUENCES),
        SPLITS=SPLITS,
        LEAST=SPLIT_KEYS,
        BLOCK_Q=tile.rows,
        BLOCK_K=tile.columns,
        BLOCK_H=power_of_two(head_size, 1 << 16, least=DOT_MINIMUM),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    join_sums_kernel[(triton.cdiv(count, JOINED),)](
        sums, logsumexp, logsumexp.stride(0), count, HEADS=heads, SPLITS=SPLITS, BLOCK=JOINED, num_warps=JOIN_WARPS
    )


launch_invariant = partial(launch, fixed=True)
