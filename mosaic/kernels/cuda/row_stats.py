"""row_stats on CUDA: the statistics of each row of logits that samplers use, in one pass over the vocabulary.

The logits are read only. One program a row, no scratch; a thread keeps the state of the columns that it reads, so that
threads meet once a row, not once a tile. A lane reads of a tile what is a group of random numbers, whether any are drawn or not:
the statistics are the same to the bit. Legend: C rows, V vocabulary, L lanes (threads) of a program, W columns of a run.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import tl, triton
from mosaic.kernels.cuda.shared.sampling import (
    BLOCK,
    GUMBEL_SLACK,
    RUN,
    STRIDE,
    exponential,
    group_numbers,
    gumbel,
    random_words,
)
from mosaic.kernels.cuda.shared.statistics import LAST, exponentials, finish, rebase

WARPS: Final = 16
"""Whatever the number of rows is: a row's sums are added up in an order that depends on it. Eight were no faster on an H200."""
AGAIN: Final = 16
"""Tiles of a lane that are looked at once more at a time."""


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
def score_column(logits, word, first, second, at_first, at_second, noise):
    """Score columns of which the group's two smallest numbers, and whether they are here, are known."""
    number = tl.where(at_second, second, second + exponential(word))
    return logits + noise * gumbel(tl.where(at_first, first, number))


@triton.jit
def draw_again(row, start, lane, columns, key, noise, TILES: tl.constexpr, TILE: tl.constexpr):
    """Score every column that a lane reads in some tiles from `start` on; return the best score and its column."""
    lane_start = start + tl.arange(0, TILES)[:, None] * TILE + lane // (STRIDE // RUN) * BLOCK
    run = lane % (STRIDE // RUN) * RUN + tl.arange(0, RUN)[None, :]
    column = lane_start + run
    zero, one, two, three = load_four(row, column, columns)
    first, second, place, next_place = group_numbers(lane_start // STRIDE + lane % (STRIDE // RUN), key)
    word_0, word_1, word_2, word_3 = random_words((lane_start // 4 + run).to(tl.uint32), 0, key)
    here, there = place - tl.arange(0, RUN)[None, :], next_place - tl.arange(0, RUN)[None, :]
    zero = score_column(zero, word_0, first, second, here == 0, there == 0, noise)
    one = score_column(one, word_1, first, second, here == RUN, there == RUN, noise)
    two = score_column(two, word_2, first, second, here == 2 * RUN, there == 2 * RUN, noise)
    three = score_column(three, word_3, first, second, here == 3 * RUN, there == 3 * RUN, noise)
    best = tl.max(largest(zero, one, two, three), 0)
    return best, first_column(zero, one, two, three, best, column)


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
    SAMPLE: tl.constexpr,
    TILES: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = logits + program * stride
    lane = tl.arange(0, LANES)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    within = lane // STRIDE * BLOCK + lane % STRIDE
    # of each lane: the largest logit and where its tile starts, and the second largest of its tiles' largest
    best = tl.full([LANES], float("-inf"), tl.float32)
    runner_up = tl.full([LANES], float("-inf"), tl.float32)
    best_start = tl.zeros([LANES], tl.int32)
    total = tl.zeros([LANES], tl.float32)
    weighted = tl.zeros([LANES], tl.float32)
    # of each lane: the best score where its groups have their smallest numbers, and a bound on all its other scores
    score = tl.full([LANES], float("-inf"), tl.float32)
    drawn = tl.full([LANES], LAST, tl.int32)
    others = tl.full([LANES], float("-inf"), tl.float32)
    if SAMPLE:
        key = tl.load(keys + program)
        noise = tl.load(temperature + program)
        lanes = tl.arange(0, LANES)
        run = lanes // (STRIDE // RUN) * BLOCK + lanes % (STRIDE // RUN) * RUN
    for start in range(0, columns, 4 * LANES * RUN):
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
        if SAMPLE:  # noqa: SIM102
            if noise > 0.0:
                least, next_least, place, _ = group_numbers(lanes + start // STRIDE, key)
                shift = noise * gumbel(least)
                at_place = start + run + place // RUN * STRIDE + place % RUN
                # read again, as registers have no index: seldom, once the lane has a good score
                may_win = (top + shift > score) & (at_place < columns)
                scored = tl.load(row + at_place, mask=may_win, other=float("-inf")).to(tl.float32) + shift
                drawn = tl.where(scored > score, at_place, drawn)  # strictly: a tie keeps the earlier column
                score = tl.maximum(scored, score)
                others = tl.maximum(others, top + noise * (gumbel(next_least) + GUMBEL_SLACK))
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
    _, total, weighted = rebase(best, row_best, total, weighted)
    log_sum, spread = finish(row_best, tl.sum(total, 0), tl.sum(weighted, 0))
    tl.store(token + program, at.to(tl.int64))
    tl.store(maximum + program, row_best)
    tl.store(second + program, tl.max(rest, 0))
    tl.store(logsumexp + program, log_sum)
    tl.store(entropy + program, spread)
    if SAMPLE:
        token_drawn = at
        if noise > 0.0:
            best_score = tl.max(score, 0)
            token_drawn = tl.min(tl.where(score == best_score, drawn, LAST), 0)
            # Lanes whose other scores may win, or tie at a lower column: few, whatever the vocabulary.
            most = tl.max(others, 0)
            while (most >= best_score) & (most > float("-inf")):
                chosen = tl.min(tl.where(others == most, lanes, LANES), 0)
                for first_tile in range(0, columns, 4 * LANES * RUN * TILES):
                    again, at_again = draw_again(row, first_tile, chosen, columns, key, noise, TILES, 4 * LANES * RUN)
                    wins = (again > best_score) | ((again == best_score) & (at_again < token_drawn))
                    token_drawn = tl.where(wins, at_again, token_drawn)
                    best_score = tl.maximum(again, best_score)
                others = tl.where(lanes == chosen, float("-inf"), others)
                most = tl.max(others, 0)
            token_drawn = tl.where(token_drawn < columns, token_drawn, 0)  # a row of -inf has none
        tl.store(sample + program, token_drawn.to(tl.int64))
        tl.store(sample_logit + program, tl.load(row + token_drawn).to(tl.float32))


def launch(
    *, logits: Tensor, token: Tensor, maximum: Tensor, second: Tensor, logsumexp: Tensor, entropy: Tensor,
    scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the five statistics of the rows of logits [C, V]."""
    launch_rows("row_stats", logits, (token, maximum, second, logsumexp, entropy))


def launch_rows(
    kernel: str,
    logits: Tensor,
    statistics: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    sampling: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Launch for row_stats; with keys, temperature, sample and sample_logit for row_sample."""
    rows, vocabulary = logits.shape
    sampled = sampling is not None
    token, maximum = statistics[:2]
    keys, temperature, sample, sample_logit = sampling or (token, maximum, token, maximum)  # stand-ins, not touched
    row_kernel[(rows,)](
        logits,
        keys,
        temperature,
        *statistics,
        sample,
        sample_logit,
        logits.stride(0),
        vocabulary,
        LANES=32 * WARPS,
        SAMPLE=sampled,
        TILES=AGAIN,
        num_warps=WARPS,
    )
