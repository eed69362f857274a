"""transfer on CUDA: the rows that are committed by their scores, and the resulting tokens, in one launch.

The rules are those of the operator's record. One program per sequence, and one for the padding behind the last; nothing
is read on the host. Each rule commits a number of candidates with the highest scores. A program counts that number. It
finds the lowest score among them by bisection over the ranks of float32 numbers, in at most 32 counts of its rows. Of
the rows with that score, it commits the lowest ones. Legend: M rows, B sequences.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import tl, triton
from mosaic.kernels.cuda.shared.order import rank

# Untuned defaults: rows of a tile and warps, for few rows in all and for many.
FEW: Final = 4096
FEW_TILE: Final = (1024, 4)
MANY_TILE: Final = (4096, 16)


@triton.jit
def ranked_rows(score, current, row, end, mask_id):
    """Ranks of some rows' scores, and which of them are candidates."""
    inside = row < end
    candidate = inside & (tl.load(current + row, mask=inside, other=0) == mask_id)
    return rank(tl.load(score + row, mask=inside, other=0.0)), candidate


@triton.jit
def count_from(score, current, start, end, mask_id, least, BLOCK: tl.constexpr):
    """Count the candidates in [start, end) whose rank is `least` or higher."""
    number = tl.zeros([BLOCK], tl.int32)
    for first in range(start, end, BLOCK):
        ranks, candidate = ranked_rows(score, current, first + tl.arange(0, BLOCK), end, mask_id)
        number += (candidate & (ranks >= least)).to(tl.int32)
    return tl.sum(number, 0)


@triton.jit
def stop_by_factor(score, current, start, end, mask_id, candidates, factor, BLOCK: tl.constexpr):
    """Fast-dLLM's factor rule: bisect for the stop, as scores fall and thresholds rise."""
    stop = tl.minimum(candidates, 1)
    if count_from(score, current, start, end, mask_id, rank(tl.full([], -1.0, tl.float32)), BLOCK) > 0:
        last = candidates - 1
        stop_end = last
        while stop < stop_end:
            middle = (stop + stop_end) // 2
            step = 1.0 - tl.div_rn(factor, (middle + 2).to(tl.float32))
            if count_from(score, current, start, end, mask_id, rank(step), BLOCK) <= middle:
                stop_end = middle
            else:
                stop = middle + 1
        stop = tl.where(stop < last, stop, candidates)
    return stop


@triton.jit(do_not_specialize=["count", "seqs", "mask_id"])
def transfer_kernel(
    token,
    score,
    current,
    cu_rows,
    quota,
    threshold,
    edit_threshold,
    chosen,
    committed,
    count,
    seqs,
    mask_id,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    start = tl.minimum(tl.load(cu_rows + sequence), count)
    if sequence == seqs:  # the padding
        for first in range(start, count, BLOCK):
            row = first + tl.arange(0, BLOCK)
            tl.store(chosen + row, tl.load(current + row, mask=row < count), mask=row < count)
            tl.store(committed + row, tl.zeros([BLOCK], tl.uint8), mask=row < count)
    else:
        end = tl.minimum(tl.load(cu_rows + sequence + 1), count)
        limit = tl.load(threshold + sequence)
        candidates = count_from(score, current, start, end, mask_id, -0x80000000, BLOCK)
        wanted = tl.maximum(tl.load(quota + sequence), 0)
        if RULE == "dynamic" or RULE == "edit":
            wanted = tl.maximum(wanted, count_from(score, current, start, end, mask_id, rank(limit) + 1, BLOCK))
        elif RULE == "above":
            wanted = count_from(score, current, start, end, mask_id, rank(limit) + 1, BLOCK)
        elif RULE == "threshold":
            wanted = tl.maximum(count_from(score, current, start, end, mask_id, rank(limit), BLOCK), 1)
        elif RULE == "factor":
            wanted = stop_by_factor(score, current, start, end, mask_id, candidates, limit, BLOCK)
        wanted = tl.minimum(wanted, candidates)
        # the highest rank from which on there are `wanted` rows; int64, as the middle of two int32 overflows
        low = (start * 0).to(tl.int64) - 0x80000000
        high = low + 0x100000000
        if wanted == candidates:
            high = low + 1
        while high - low > 1:
            middle = (low + high) >> 1
            if count_from(score, current, start, end, mask_id, middle, BLOCK) >= wanted:
                low = middle
            else:
                high = middle
        ties = wanted - count_from(score, current, start, end, mask_id, low + 1, BLOCK)
        for first in range(start, end, BLOCK):
            row = first + tl.arange(0, BLOCK)
            ranks, candidate = ranked_rows(score, current, row, end, mask_id)
            tie = (candidate & (ranks == low)).to(tl.int32)
            place = tl.cumsum(tie, 0)
            take = candidate & ((ranks > low) | ((tie != 0) & (place <= ties)))
            ties -= tl.sum(tie, 0)
            before = tl.load(current + row, mask=row < end, other=0)
            after = tl.load(token + row, mask=row < end, other=0)
            if RULE == "edit":
                high_enough = ranks > rank(tl.load(edit_threshold + sequence))
                take = take | ((before != mask_id) & (after != before) & high_enough)
            tl.store(chosen + row, tl.where(take, after, before), mask=row < end)
            tl.store(committed + row, take.to(tl.uint8), mask=row < end)


def launch(
    *, token: Tensor, score: Tensor, current: Tensor, cu_rows: Tensor, quota: Tensor, threshold: Tensor, chosen: Tensor,
    committed: Tensor, rule: str, mask_id: int, edit_threshold: Tensor | None = None, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write chosen [M] and committed [M]."""
    count, seqs = score.shape[0], quota.shape[0]
    block, warps = FEW_TILE if count <= FEW else MANY_TILE
    transfer_kernel[(seqs + 1,)](
        token,
        score,
        current,
        cu_rows,
        quota,
        threshold,
        threshold if edit_threshold is None else edit_threshold,  # a stand-in, not touched
        chosen,
        committed,
        count,
        seqs,
        mask_id,
        RULE=rule,
        BLOCK=block,
        num_warps=warps,
    )
