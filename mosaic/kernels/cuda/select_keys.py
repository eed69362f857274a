"""select_keys on CUDA: the rows of each sequence whose keys are kept, per list, without sorting.

A first launch writes the totals of all candidates side by side. In a second one a program for each sequence and list finds the
lowest total that is chosen, by bisection over the bits of float32, turned so that they order as the totals do. Then it writes the
candidates above it, and of those that tie with it the lowest ones. Bounds are read on the device alone. Legend: T rows, B
sequences.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import power_of_two, tl, triton
from mosaic.kernels.cuda.shared.scratch import floats_of
from mosaic.kernels.cuda.shared.sequences import SEQUENCES, first_sequence

# Untuned defaults.
POOLED: Final = 256
"""Candidates of a program that adds up totals."""
TILE: Final = 2048
"""Totals that a program has in registers when it chooses."""
LEAST: Final = 256
WARPS: Final = 8


@triton.jit
def row_of(candidate, start, low, high):
    """The row of the step of a candidate: none is in the span."""
    return start + candidate + tl.where(candidate < low, 0, high - low)


@triton.jit(do_not_specialize=["sequences"])
def totals_kernel(
    scores,
    spans,
    cu_seqlens,
    totals,
    scores_stride,
    totals_stride,
    sequences,
    SEQUENCES: tl.constexpr,
    MEMBERS: tl.constexpr,
    POOL: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    own = tl.program_id(1)
    first = scores + own.to(tl.int64) * MEMBERS * scores_stride
    sequence = first_sequence(tl.program_id(0) * BLOCK, cu_seqlens, sequences, SEQUENCES)
    start = tl.load(cu_seqlens + sequence)
    until = tl.minimum((tl.program_id(0) + 1) * BLOCK, tl.load(cu_seqlens + sequences))
    while start < until:
        end = tl.load(cu_seqlens + sequence + 1)
        low = tl.load(spans + 5 * sequence + 2)
        high = tl.load(spans + 5 * sequence + 3)
        count = end - start - (high - low)
        candidate = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) - start
        total = tl.zeros([BLOCK], tl.float32)
        if EACH:
            for member in range(MEMBERS):
                pooled = tl.full([BLOCK], float("-inf"), tl.float32)
                for distance in range(-(POOL // 2), POOL // 2 + 1):
                    near = candidate + distance
                    place = first + member * scores_stride + row_of(near, start, low, high)
                    found = tl.load(place, mask=(near >= 0) & (near < count), other=float("-inf"))
                    pooled = tl.maximum(pooled, found)
                total += pooled
        else:
            pooled = tl.full([BLOCK], float("-inf"), tl.float32)
            for distance in range(-(POOL // 2), POOL // 2 + 1):
                near = candidate + distance
                there = (near >= 0) & (near < count)
                found = tl.zeros([BLOCK], tl.float32)
                for member in range(MEMBERS):
                    found += tl.load(
                        first + member * scores_stride + row_of(near, start, low, high), mask=there, other=0.0
                    )
                pooled = tl.maximum(pooled, tl.where(there, found, float("-inf")))
            total = pooled
        mine = (candidate >= 0) & (candidate < count)
        tl.store(totals + own.to(tl.int64) * totals_stride + start + candidate, total, mask=mine)
        sequence += 1
        start = end


@triton.jit
def bits_of(totals, candidate, count):
    """Totals as integers that order as they do; the least one where there is no candidate."""
    bits = tl.load(totals + candidate, mask=candidate < count, other=0.0).to(tl.int32, bitcast=True)
    return tl.where(candidate < count, bits ^ ((bits >> 31) & 0x7FFFFFFF), -0x80000000)


@triton.jit(do_not_specialize=["column"])
def choose_kernel(
    totals,
    spans,
    cu_seqlens,
    held,
    held_row,
    chosen,
    totals_stride,
    held_stride,
    chosen_stride,
    column,
    HELD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    own = tl.program_id(0).to(tl.int64)
    sequence = tl.program_id(1)
    start = tl.load(cu_seqlens + sequence)
    low = tl.load(spans + 5 * sequence + 2)
    high = tl.load(spans + 5 * sequence + 3)
    kept = tl.load(spans + 5 * sequence + 4)
    if HELD:
        bounds = held + tl.load(held_row + sequence) * held_stride + column + 2 * own
        kept = tl.load(bounds + 1) - tl.load(bounds)
    count = tl.load(cu_seqlens + sequence + 1) - start - (high - low)
    mine = totals + own * totals_stride + start
    to = chosen + own * chosen_stride + start
    item = tl.arange(0, BLOCK)
    if count > 0:
        # at least `kept` totals reach `least`, and `above` of them, fewer, reach `beyond`
        bits = bits_of(mine, item, count)
        least = tl.full([], -0x80000000, tl.int64)
        beyond = tl.full([], 0x7FFFFFFF, tl.int64)
        above = count * 0
        while beyond - least > 1:
            middle = least + (beyond - least) // 2
            reach = tl.sum((bits >= middle).to(tl.int32), 0)
            for some in range(BLOCK, count, BLOCK):
                reach += tl.sum((bits_of(mine, some + item, count) >= middle).to(tl.int32), 0)
            stays = reach >= kept
            least = tl.where(stays, middle, least)
            beyond = tl.where(stays, beyond, middle)
            above = tl.where(stays, above, reach)
        done = count * 0
        tied = count * 0
        for some in range(0, count, BLOCK):
            candidate = some + item
            bits = bits_of(mine, candidate, count)
            tie = (bits == least).to(tl.int32)
            taken = (bits > least) | ((bits == least) & (tied + tl.cumsum(tie, 0) <= kept - above))
            number = taken.to(tl.int32)
            tl.store(to + done + tl.cumsum(number, 0) - 1, row_of(candidate, start, low, high), mask=taken)
            done += tl.sum(number, 0)
            tied += tl.sum(tie, 0)
    for some in range(0, high - low, BLOCK):
        tl.store(to + kept + some + item, start + low + some + item, mask=some + item < high - low)


def launch(
    *, scores: Tensor, spans: Tensor, cu_seqlens: Tensor, chosen: Tensor, members: int, pool: int, pools: str = "each",
    held: Tensor | None = None, held_row: Tensor | None = None, slot: int = 0, kv_heads: int = 1,
    scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the chosen rows of each sequence and list into chosen [N, T]."""
    (lists, rows), sequences = chosen.shape, spans.shape[0]
    totals = floats_of("select_keys", scratch, lists * rows)
    totals_kernel[(triton.cdiv(rows, POOLED), lists)](
        scores,
        spans,
        cu_seqlens,
        totals,
        scores.stride(0),
        rows,
        sequences,
        SEQUENCES=power_of_two(sequences, 1 << 16, least=SEQUENCES),
        MEMBERS=members,
        POOL=pool,
        EACH=pools == "each",
        BLOCK=POOLED,
    )
    tile = power_of_two(-(-rows // sequences), TILE, least=LEAST)
    choose_kernel[(lists, sequences)](
        totals,
        spans,
        cu_seqlens,
        spans if held is None else held,
        spans if held_row is None else held_row,
        chosen,
        rows,
        0 if held is None else held.stride(0),
        chosen.stride(0),
        2 * slot * kv_heads,
        HELD=held is not None,
        BLOCK=tile,
        num_warps=max(1, min(WARPS, tile // 256)),
    )
