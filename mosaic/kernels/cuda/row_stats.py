"""row_stats on CUDA: what a sampler needs of each row of logits, in one pass over the vocabulary.

Contract: row_stats(logits[C, V]) -> token[C] int64 (argmax, ties to the lower index), maximum[C], second[C] (second
largest logit), logsumexp[C], entropy[C] (natural logarithm), float32. The logits are read only. One program a row, no
scratch; a thread keeps the state of the columns that it reads, so that threads meet once a row, not once a tile.
Legend: C rows, V vocabulary, L lanes (threads) of a program, W columns that one load of a lane brings.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from mosaic.kernels._operands import check_shapes
from mosaic.kernels._statistics import check_outputs
from mosaic.kernels.cuda._sampling import GROUP, GUMBEL_MOST, GUMBEL_SLACK, STRIDE, gumbel, random_words
from mosaic.kernels.cuda._statistics import LAST, exponentials, finish, join, rebase
from mosaic.kernels.cuda._triton import tl, triton
from mosaic.kernels.row_stats import reference

__all__ = ["launch", "launch_rows", "reference"]


WARPS: Final = 8
FEW_ROWS: Final = 264
FEW_WARPS: Final = 16
"""Up to so many rows, two for each multiprocessor of a large card, a row wants more warps."""
LOAD_BYTES: Final = 16
SAMPLED_WIDTH: Final = 4
"""Columns of a load where random numbers take as many registers again as the logits."""


@triton.jit
def load_four(row, column, columns):
    """Load the logits of the columns [L, W] and of those one, two and three strides on; -inf past the last."""
    zero = tl.load(row + column, mask=column < columns, other=float("-inf"))
    one = tl.load(row + column + STRIDE, mask=column + STRIDE < columns, other=float("-inf"))
    two = tl.load(row + column + 2 * STRIDE, mask=column + 2 * STRIDE < columns, other=float("-inf"))
    three = tl.load(row + column + 3 * STRIDE, mask=column + 3 * STRIDE < columns, other=float("-inf"))
    return zero.to(tl.float32), one.to(tl.float32), two.to(tl.float32), three.to(tl.float32)


@triton.jit
def largest(zero, one, two, three):
    """Reduce four tiles [L, W] to the largest of every lane."""
    return tl.max(tl.maximum(tl.maximum(zero, one), tl.maximum(two, three)), 1)


@triton.jit
def first_column(zero, one, two, three, value, column):
    """Find the first column of four tiles where a value stands; LAST if it does not."""
    low = tl.minimum(tl.where(zero == value, column, LAST), tl.where(one == value, column + STRIDE, LAST))
    high = tl.minimum(
        tl.where(two == value, column + 2 * STRIDE, LAST), tl.where(three == value, column + 3 * STRIDE, LAST)
    )
    return tl.min(tl.min(tl.minimum(low, high), 1), 0)


@triton.jit
def row_kernel(
    logits,
    keys,
    temperature,
    token,
    maximum,
    second,
    logsumexp,
    entropy,
    sample,
    sample_logit,
    stride,
    columns,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = logits + program * stride
    lane = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    within = lane // STRIDE * GROUP + lane % STRIDE
    # of each lane: the largest logit and where its tile starts, and the second largest of its tiles' largest
    best = tl.full([LANES], float("-inf"), tl.float32)
    runner_up = tl.full([LANES], float("-inf"), tl.float32)
    best_start = tl.zeros([LANES], tl.int32)
    total = tl.zeros([LANES], tl.float32)
    weighted = tl.zeros([LANES], tl.float32)
    # of the row
    score = tl.max(best, 0)
    drawn = tl.max(best_start, 0)
    if SAMPLE:
        key = tl.load(keys + program)
        noise = tl.load(temperature)
    for start in range(0, columns, 4 * LANES * WIDTH):
        column = start + within
        zero, one, two, three = load_four(row, column, columns)
        top = largest(zero, one, two, three)
        runner_up = tl.maximum(runner_up, tl.minimum(best, top))
        best_start = tl.where(top > best, start, best_start)  # strictly: a tie keeps the earlier tile
        new_best = tl.maximum(best, top)
        base, total, weighted = rebase(best, new_best, total, weighted)
        best = new_best
        total, weighted = exponentials(zero, base, total, weighted)
        total, weighted = exponentials(one, base, total, weighted)
        total, weighted = exponentials(two, base, total, weighted)
        total, weighted = exponentials(three, base, total, weighted)
        # Three tests, each dearer than the one before, for whether the tile can beat the row's best score.
        if SAMPLE:  # noqa: SIM102
            if noise > 0.0:  # noqa: SIM102
                if tl.max(top, 0) + noise * GUMBEL_MOST > score:
                    word_0, word_1, word_2, word_3 = random_words((start // 4 + lane).to(tl.uint32), key)
                    # the smallest word gives the largest g
                    least = tl.min(tl.minimum(tl.minimum(word_0, word_1), tl.minimum(word_2, word_3)), 1)
                    if tl.max(top + noise * (gumbel(least) + GUMBEL_SLACK), 0) > score:
                        zero += noise * gumbel(word_0)
                        one += noise * gumbel(word_1)
                        two += noise * gumbel(word_2)
                        three += noise * gumbel(word_3)
                        most = tl.max(largest(zero, one, two, three), 0)
                        if most > score:
                            score = most
                            drawn = first_column(zero, one, two, three, most, column)
    row_best = tl.max(best, 0)
    # Where a lane met the largest logit, its tile once more: in which column, and what else is there. One load at a
    # time, for few registers.
    met = best == row_best
    at = LAST
    for part in range(4):
        column = best_start[:, None] + within + part * STRIDE
        again = tl.load(row + column, mask=met[:, None] & (column < columns), other=float("-inf")).to(tl.float32)
        at = tl.minimum(at, tl.min(tl.min(tl.where(again == row_best, column, LAST), 1), 0))
    at = tl.where(at < columns, at, 0)  # a row of -inf has none
    rest = tl.maximum(tl.where(met, float("-inf"), best), runner_up)
    for part in range(4):
        column = best_start[:, None] + within + part * STRIDE
        again = tl.load(row + column, mask=met[:, None] & (column < columns), other=float("-inf")).to(tl.float32)
        rest = tl.maximum(rest, tl.max(tl.where(column == at, float("-inf"), again), 1))
    joined, total, weighted = join(best[None, :], total[None, :], weighted[None, :])
    log_sum, spread = finish(joined, total, weighted)
    place = program + tl.arange(0, 1)
    tl.store(token + program, at.to(tl.int64))
    tl.store(maximum + program, row_best)
    tl.store(second + program, tl.max(rest, 0))
    tl.store(logsumexp + place, log_sum)
    tl.store(entropy + place, spread)
    if SAMPLE:
        drawn = tl.where(noise > 0.0, drawn, at)
        tl.store(sample + program, drawn.to(tl.int64))
        tl.store(sample_logit + program, tl.load(row + drawn).to(tl.float32))


def launch(
    *,
    logits: Tensor,
    token: Tensor,
    maximum: Tensor,
    second: Tensor,
    logsumexp: Tensor,
    entropy: Tensor,
    scratch: Tensor | None = None,
) -> None:
    """Write the five statistics of the rows of logits [C, V]."""
    check_outputs("row_stats", logits.shape[0], token, maximum, second, logsumexp, entropy)
    launch_rows("row_stats", logits, (token, maximum, second, logsumexp, entropy))


def launch_rows(
    kernel: str,
    logits: Tensor,
    statistics: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    sampling: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Launch for row_stats; with keys, temperature, sample and sample_logit for row_sample."""
    rows, vocabulary = logits.shape
    check_shapes(kernel, logits=(logits, (rows, vocabulary), None))
    sampled = sampling is not None
    token, maximum = statistics[:2]
    keys, temperature, sample, sample_logit = sampling or (token, maximum, token, maximum)  # stand-ins, not touched
    warps = FEW_WARPS if rows <= FEW_ROWS else WARPS
    row_kernel[(rows,)](
        logits,
        keys,
        temperature,
        *statistics,
        sample,
        sample_logit,
        logits.stride(0),
        vocabulary,
        LANES=32 * warps,
        WIDTH=SAMPLED_WIDTH if sampled else LOAD_BYTES // logits.element_size(),
        SAMPLE=sampled,
        num_warps=warps,
    )
