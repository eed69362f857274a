"""row_nucleus on CUDA: a token of each row drawn from those within top-p and top-k, without sorting or scratch.

One program a row. What is kept is a prefix of the tokens in the order of their logits: the lowest kept logit is found by
bisection over the ranks of the dtype's numbers (16 passes over the row in 16 bits, 32 in float32; none where top_p and top_k
are off), and of the tokens that tie with it the lowest ids are kept. Legend: C rows, V vocabulary, L lanes (threads) of a
program.
"""

from typing import Final

import torch
from torch import Tensor

from mosaic.kernels.cuda.row_stats import first_column, largest, load_four, score_column
from mosaic.kernels.cuda.shared.launching import tl, triton
from mosaic.kernels.cuda.shared.order import rank
from mosaic.kernels.cuda.shared.sampling import BLOCK, RUN, STRIDE, group_numbers, random_words
from mosaic.kernels.cuda.shared.statistics import LAST

# Untuned defaults.
WARPS: Final = 8
COLUMNS: Final = 4096
"""Columns in a tile of a pass."""
ZERO_BITS: Final = {torch.bfloat16: 16, torch.float16: 13}
"""Trailing bits that the dtype's numbers do not use as float32."""
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_LOWEST = tl.constexpr(-2139095041)
"""Rank of -inf."""


@triton.jit
def load_ranked(row, column, columns, SHIFT: tl.constexpr):
    """Load logits as float32, -inf past the last, and their ranks without the bits that are never used."""
    logits = tl.load(row + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    return logits, rank(logits) >> SHIFT


@triton.jit
def weigh(logits, top, scale):
    """exp((logit - top) / temperature); `scale` is log2(e) / temperature."""
    return tl.exp2((logits - top) * scale)


@triton.jit
def logit_of(ranks, SHIFT: tl.constexpr):
    """The float32 number of a rank, int64."""
    whole = (ranks << SHIFT) | tl.where(ranks < 0, (1 << SHIFT) - 1, 0)
    bits = whole.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def mass_above(row, columns, least, top, scale, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Mass and number of the tokens whose rank is above `least`."""
    mass = tl.zeros([TILE], tl.float32)
    number = tl.zeros([TILE], tl.int32)
    for start in range(0, columns, TILE):
        column = start + tl.arange(0, TILE)
        logits, ranks = load_ranked(row, column, columns, SHIFT)
        chosen = (ranks > least) & (column < columns)
        mass += tl.where(chosen, weigh(logits, top, scale), 0.0)
        number += chosen.to(tl.int32)
    return tl.sum(mass, 0), tl.sum(number, 0)


@triton.jit
def last_tie(row, columns, least, ties, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """The column of the last kept one of the tokens of one rank."""
    bound = (ties * 0).to(tl.int32) - 1
    for start in range(0, columns, TILE):
        if ties > 0:
            column = start + tl.arange(0, TILE)
            _, ranks = load_ranked(row, column, columns, SHIFT)
            tie = ((ranks == least) & (column < columns)).to(tl.int32)
            kept = (tie != 0) & (tl.cumsum(tie, 0) <= ties)
            bound = tl.maximum(bound, tl.max(tl.where(kept, column, -1), 0))
            ties -= tl.sum(tie, 0)
    return bound


@triton.jit
def only_kept(logits, column, least, bound, SHIFT: tl.constexpr):
    """The logits of kept tokens, -inf elsewhere."""
    ranks = rank(logits) >> SHIFT
    return tl.where((ranks > least) | ((ranks == least) & (column <= bound)), logits, float("-inf"))


@triton.jit(do_not_specialize=["some"])
def row_nucleus_kernel(
    logits,
    keys,
    temperature,
    top_p,
    top_k,
    cuts,
    sample,
    probability,
    margin,
    entropy,
    stride,
    columns,
    some,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    if (tl.load(cuts + program) == 0) & (some != 0):  # not a kernel of its own: a row's figures are the same to the bit
        return
    row = logits + program * stride
    heat = tl.load(temperature + program)
    scale = _LOG2E / tl.where(heat > 0.0, heat, 1.0)
    # of each place in a tile: the largest logit and the first column that has it
    best = tl.full([TILE], float("-inf"), tl.float32)
    at = tl.full([TILE], LAST, tl.int32)
    for start in range(0, columns, TILE):
        column = start + tl.arange(0, TILE)
        given, _ = load_ranked(row, column, columns, SHIFT)
        at = tl.where(given > best, column, at)  # strictly: a tie keeps the earlier column
        best = tl.maximum(best, given)
    most = tl.max(best, 0)
    first = tl.min(tl.where(best == most, at, LAST), 0)
    first = tl.where(first < columns, first, 0)  # a row of -inf has none
    top = tl.maximum(most, -1e38)
    limit = tl.load(top_p + program)
    few = tl.load(top_k + program)
    few = tl.where(few > 0, few, LAST)
    none = (
        (few * 0).to(tl.int64) + (_LOWEST >> SHIFT) - 1
    )  # below every rank; int64, as the middle of two int32 overflows
    least = none
    bound = columns
    if (limit < 1.0) | (few < columns):
        total, _ = mass_above(row, columns, none, top, scale, SHIFT, TILE)
        allowed = tl.where(limit < 1.0, tl.maximum(limit, 0.0) * total, float("inf"))
        # the lowest rank above which there is no more mass than allowed, and fewer tokens than asked for
        high = (rank(most) >> SHIFT).to(tl.int64)
        while least < high:
            middle = (least + high) >> 1
            mass, number = mass_above(row, columns, middle, top, scale, SHIFT, TILE)
            if (mass <= allowed) & (number < few):
                high = middle
            else:
                least = middle + 1
        if least > none:  # of the tokens of this rank: how many fit, and which column has the last of them
            mass, number = mass_above(row, columns, least, top, scale, SHIFT, TILE)
            weight = tl.maximum(weigh(logit_of(least, SHIFT), top, scale), 1e-30)
            fit = tl.minimum((allowed - mass) / weight, 1e9).to(tl.int32) + 1
            bound = last_tie(row, columns, least, tl.minimum(fit, few - number), SHIFT, TILE)
    # of each place: the mass of the kept, and their largest logit but for the first
    mass = tl.zeros([TILE], tl.float32)
    runner_up = tl.full([TILE], float("-inf"), tl.float32)
    for start in range(0, columns, TILE):
        column = start + tl.arange(0, TILE)
        given, _ = load_ranked(row, column, columns, SHIFT)
        kept = only_kept(given, column, least, bound, SHIFT)
        mass += weigh(kept, top, scale)
        runner_up = tl.maximum(runner_up, tl.where(column == first, float("-inf"), kept))
    total = tl.maximum(tl.sum(mass, 0), 1.0)  # at least the first's own 1
    spread = tl.zeros([TILE], tl.float32)
    for start in range(0, columns, TILE):
        column = start + tl.arange(0, TILE)
        given, _ = load_ranked(row, column, columns, SHIFT)
        chance = weigh(only_kept(given, column, least, bound, SHIFT), top, scale) / total
        spread += chance * (tl.log2(chance + 1e-10) * _LN2)
    token = first
    if heat > 0.0:
        key = tl.load(keys + program)
        lane = tl.arange(0, LANES)[:, None]
        run = tl.arange(0, RUN)[None, :]
        best_score = tl.full([], float("-inf"), tl.float32)
        for start in range(0, columns, 4 * LANES * RUN):
            lane_start = start + lane // (STRIDE // RUN) * BLOCK
            column = lane_start + lane % (STRIDE // RUN) * RUN + run
            zero, one, two, three = load_four(row, column, columns)
            zero = only_kept(zero, column, least, bound, SHIFT)
            one = only_kept(one, column + STRIDE, least, bound, SHIFT)
            two = only_kept(two, column + 2 * STRIDE, least, bound, SHIFT)
            three = only_kept(three, column + 3 * STRIDE, least, bound, SHIFT)
            if tl.max(largest(zero, one, two, three), 0) > float("-inf"):
                low, next_low, place, next_place = group_numbers(lane + start // STRIDE, key)
                word_0, word_1, word_2, word_3 = random_words((lane * RUN + start // 4 + run).to(tl.uint32), 0, key)
                here, there = place - run, next_place - run
                zero = score_column(zero, word_0, low, next_low, here == 0, there == 0, heat)
                one = score_column(one, word_1, low, next_low, here == RUN, there == RUN, heat)
                two = score_column(two, word_2, low, next_low, here == 2 * RUN, there == 2 * RUN, heat)
                three = score_column(three, word_3, low, next_low, here == 3 * RUN, there == 3 * RUN, heat)
                again = tl.max(largest(zero, one, two, three), 0)
                at_again = first_column(zero, one, two, three, again, column)
                token = tl.where(again > best_score, at_again, token)  # strictly: a tie keeps the earlier column
                best_score = tl.maximum(again, best_score)
    chance = weigh(tl.load(row + token).to(tl.float32), top, scale) / total
    one_place = program + tl.arange(0, 1)
    first_chance = weigh(most, top, scale) / total
    tl.store(sample + program, token.to(tl.int64))
    tl.store(probability + program, chance)
    tl.store(margin + program, first_chance - weigh(tl.max(runner_up, 0), top, scale) / total)
    tl.store(entropy + one_place, tl.sum(spread, 0))


def launch(
    *, logits: Tensor, keys: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, cuts: Tensor | None = None,
    sample: Tensor, probability: Tensor, margin: Tensor, entropy: Tensor, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the samples and the figures of the rows of logits [C, V], or of those that `cuts` names."""
    rows, vocabulary = logits.shape
    row_nucleus_kernel[(rows,)](
        logits,
        keys,
        temperature,
        top_p,
        top_k,
        top_k if cuts is None else cuts,  # a stand-in, not looked at
        sample,
        probability,
        margin,
        entropy,
        logits.stride(0),
        vocabulary,
        int(cuts is not None),
        SHIFT=ZERO_BITS.get(logits.dtype, 0),
        TILE=COLUMNS,
        LANES=32 * WARPS,
        num_warps=WARPS,
    )
