"""unembed_stats on CUDA: the statistics of x @ weight.T, whose rows of logits never exist.

The vocabulary is split: a program keeps the statistics of a tile of rows over its part, tile by tile, as partials in scratch;
a second kernel joins a row's partials. No atomics: on one card the same input gives the same bits. Scratch: planes of [C,
splits] of 4 bytes, in the order of `partial_kernel`'s stores. Legend: C rows, D hidden, V vocabulary.
"""

from typing import Final

import torch
from torch import Tensor

from mosaic.kernels.cuda.shared.launching import TensorDescriptor, has_descriptors, power_of_two, processors, tl, triton
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
from mosaic.kernels.cuda.shared.scratch import floats_of
from mosaic.kernels.cuda.shared.statistics import LAST, exponentials, finish, join, rebase
from mosaic.kernels.cuda.shared.unembed_tiles import FEW_ROWS, narrow_columns, tile_of
from mosaic.registrar.operators.unembed_sample import SAMPLED_PARTIAL_BYTES
from mosaic.registrar.operators.unembed_stats import PARTIAL_BYTES, unembed_splits

ROW_TILES: Final = 16
"""Tiles of rows that share the weight while it is in the L2 cache; their x is there all the time."""
COMBINED: Final = 1024
"""Partials in one tile of the second kernel."""


@triton.jit
def absorb(logits, column, maximum, second, token, total, weighted):
    """Take in a tile [C, V] of float32 logits, -inf where masked; tiles come in ascending order of columns [V]."""
    tile_maximum = tl.max(logits, 1)
    tile_token = first_at(logits, column, tile_maximum)
    rest = tl.where(column[None, :] == tile_token[:, None], float("-inf"), logits)
    second = tl.maximum(tl.minimum(tile_maximum, maximum), tl.maximum(tl.max(rest, 1), second))
    token = tl.where(tile_maximum > maximum, tile_token, token)  # strictly: a tie keeps the earlier column
    new_maximum = tl.maximum(tile_maximum, maximum)
    base, total, weighted = rebase(maximum, new_maximum, total, weighted)
    total, weighted = exponentials(logits, base, total, weighted)
    return new_maximum, second, token, total, weighted


@triton.jit
def first_at(values, column, largest):
    """Find the first column [V] of every row where its largest value stands."""
    return tl.min(tl.where(values == largest[:, None], column[None, :], LAST), 1)


@triton.jit
def take_best(logits, scores, column, score, sample, sample_logit):
    """Take in scores [C, W] of logits in columns [C, W] or [1, W]; they come in no order of columns."""
    best = tl.max(scores, 1)
    at = tl.min(tl.where(scores == best[:, None], column, LAST), 1)
    logit = tl.max(tl.where((scores == best[:, None]) & (column == at[:, None]), logits, float("-inf")), 1)
    better = (best > score) | ((best == score) & (at < sample))
    return tl.where(better, best, score), tl.where(better, at, sample), tl.where(better, logit, sample_logit)


@triton.jit
def halves_of(tile, ROWS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """Split every part of a tile [C, PARTS * WIDTH] into its two halves: two tiles."""
    parts = tl.reshape(tile, [ROWS, PARTS, 2, WIDTH // 2]).permute(0, 1, 3, 2)
    left, right = tl.split(parts)
    return tl.reshape(left, [ROWS, PARTS * WIDTH // 2]), tl.reshape(right, [ROWS, PARTS * WIDTH // 2])


@triton.jit
def spread(group_values, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Repeat a value of every group [C, G] for the columns of one of its runs."""
    repeated = tl.broadcast_to(group_values[:, :, None], [ROWS, GROUPS, RUN])
    return tl.reshape(repeated, [ROWS, GROUPS * RUN])


@triton.jit
def draw_run(
    logits, word, column, first, second, here, there, noise, score, sample, sample_logit,
):  # fmt: skip
    """Take in one run of every group: its logits and words [C, W], columns [W]; is a smallest number here or there."""
    number = tl.where(here, first, tl.where(there, second, second + exponential(word)))
    return take_best(logits, logits + noise[:, None] * gumbel(number), column[None, :], score, sample, sample_logit)


@triton.jit
def draw_groups(
    logits, offset, start, keys, row, row_mask, noise, score, sample, sample_logit,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Take in the next groups of every block: the columns start + (0 .. 8 * PER) + offset and one to three strides on.

    `logits` [C, BLOCKS * 4 * PER * 8]. First come the groups' smallest numbers; the rest only where a row may win by it.
    """
    GROUPS: tl.constexpr = BLOCKS * PER
    index = tl.arange(0, GROUPS)
    first_column = start + index // PER * BLOCK + offset + index % PER * RUN
    # loaded here, not kept: the rounds' keys would be computed ahead of the loop and held in registers
    key = tl.load(keys + row, mask=row_mask, other=0)
    group = (first_column // BLOCK * (STRIDE // RUN) + first_column % STRIDE // RUN)[None, :]
    first, second, place, next_place = group_numbers(group, key[:, None])
    parts = tl.reshape(logits, [ROWS, BLOCKS, 4, PER, RUN])
    member = (tl.arange(0, 4) * RUN)[None, None, :, None, None] + tl.arange(0, RUN)[None, None, None, None, :]
    met = tl.where(member == tl.reshape(place, [ROWS, BLOCKS, 1, PER, 1]), parts, float("-inf"))
    logit = tl.reshape(tl.max(tl.max(met, 4), 2), [ROWS, GROUPS])
    top = tl.reshape(tl.max(tl.max(parts, 4), 2), [ROWS, GROUPS])
    at_place = first_column[None, :] + place // RUN * STRIDE + place % RUN
    score, sample, sample_logit = take_best(
        logit, logit + noise[:, None] * gumbel(first), at_place, score, sample, sample_logit
    )
    bound = tl.max(top + noise[:, None] * (gumbel(second) + GUMBEL_SLACK), 1)
    may_win = (noise > 0.0) & (bound >= score) & (bound > float("-inf"))  # an equal score may stand at a lower index
    wins = tl.max(may_win.to(tl.int32), 0)
    if wins > 0:
        # again, behind a factor that is 1: else it stays in registers, and the largest tile for Hopper spills
        key = tl.load(keys + row * wins, mask=row_mask, other=0)
        runs = tl.reshape(tl.reshape(logits, [ROWS, BLOCKS, 2, 2, PER * RUN]).permute(0, 1, 4, 2, 3),
                          [ROWS, GROUPS * RUN, 2, 2])  # fmt: skip
        even, odd = tl.split(runs)
        zero, two = tl.split(even)
        one, three = tl.split(odd)
        within = tl.arange(0, GROUPS * RUN)
        column = start + within // (PER * RUN) * BLOCK + offset + within % (PER * RUN)
        # A condition that always holds ties the counters to the logits, and so the random words to the threads that
        # hold their logits; else they are computed in another order and pass through shared memory.
        counter = tl.where(zero <= float("inf"), (column // BLOCK * STRIDE + column % STRIDE)[None, :], 0)
        word_0, word_1, word_2, word_3 = random_words(counter.to(tl.uint32), 0, key[:, None])
        least, next_least = spread(first, ROWS, GROUPS), spread(second, ROWS, GROUPS)
        here = spread(place, ROWS, GROUPS) - (within % RUN)[None, :]
        there = spread(next_place, ROWS, GROUPS) - (within % RUN)[None, :]
        score, sample, sample_logit = draw_run(
            zero, word_0, column, least, next_least, here == 0, there == 0, noise, score, sample, sample_logit
        )
        score, sample, sample_logit = draw_run(
            one, word_1, column + STRIDE, least, next_least, here == RUN, there == RUN, noise,
            score, sample, sample_logit,
        )  # fmt: skip
        score, sample, sample_logit = draw_run(
            two, word_2, column + 2 * STRIDE, least, next_least, here == 2 * RUN, there == 2 * RUN, noise,
            score, sample, sample_logit,
        )  # fmt: skip
        score, sample, sample_logit = draw_run(
            three, word_3, column + 3 * STRIDE, least, next_least, here == 3 * RUN, there == 3 * RUN, noise,
            score, sample, sample_logit,
        )  # fmt: skip
    return score, sample, sample_logit


@triton.jit
def logits_of(
    x, weight, first_row, row, row_mask, start, hidden, vocabulary, x_stride, weight_stride,
    BLOCK_C: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows with WIDTH rows of the weight from `start` on: logits [C, WIDTH], -inf past the last."""
    inner = tl.arange(0, BLOCK_D)
    column = start + tl.arange(0, WIDTH)
    column_mask = column < vocabulary
    logits = tl.zeros([BLOCK_C, WIDTH], tl.float32)
    if not DESCRIBED:
        x_place = x + row[:, None] * x_stride + inner[None, :]
        weight_place = weight + column[None, :].to(tl.int64) * weight_stride + inner[:, None]
    for depth in range(0, hidden, BLOCK_D):
        if DESCRIBED:  # zero past the ends
            x_tile = x.load([first_row, depth])
            weight_tile = weight.load([start, depth]).T
        else:
            inside = inner < hidden - depth
            x_tile = tl.load(x_place + depth, mask=row_mask[:, None] & inside[None, :], other=0.0)
            weight_tile = tl.load(weight_place + depth, mask=inside[:, None] & column_mask[None, :], other=0.0)
        logits = tl.dot(x_tile, weight_tile, logits, input_precision="ieee")
    return tl.where(column_mask[None, :], logits, float("-inf"))


@triton.jit(do_not_specialize=["rows", "row_tiles", "tiles", "splits"])
def partial_kernel(
    x,
    weight,
    narrow_weight,
    keys,
    temperature,
    integers,
    floats,
    x_stride,
    weight_stride,
    rows,
    hidden,
    vocabulary,
    row_tiles,
    tiles,
    splits,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    SAMPLE: tl.constexpr,
    SPLIT: tl.constexpr,
    FLATTENED: tl.constexpr,
):
    # Programs that run at the same time share tiles of the weight: all of a few tiles of rows, then the next few.
    program = tl.program_id(0)
    group = program // (GROUP_ROWS * splits) * GROUP_ROWS
    in_group = tl.minimum(row_tiles - group, GROUP_ROWS)
    within = program - group * splits
    first_row = (group + within % in_group) * BLOCK_C
    split = within // in_group
    row = first_row.to(tl.int64) + tl.arange(0, BLOCK_C)
    row_mask = row < rows
    maximum = tl.full([BLOCK_C], float("-inf"), tl.float32)
    second = tl.full([BLOCK_C], float("-inf"), tl.float32)
    token = tl.zeros([BLOCK_C], tl.int32)
    total = tl.zeros([BLOCK_C], tl.float32)
    weighted = tl.zeros([BLOCK_C], tl.float32)
    score = tl.full([BLOCK_C], float("-inf"), tl.float32)
    sample = tl.zeros([BLOCK_C], tl.int32)
    sample_logit = tl.full([BLOCK_C], float("-inf"), tl.float32)
    if SAMPLE:
        noise = tl.load(temperature + row, mask=row_mask, other=0.0)
        drawn = tl.max(noise, 0) > 0.0
    for tile in tl.range(split * tiles // splits, (split + 1) * tiles // splits, flatten=FLATTENED):
        start = tile * BLOCK_V
        logits = logits_of(
            x, weight, first_row, row, row_mask, start, hidden, vocabulary, x_stride, weight_stride,
            BLOCK_C, BLOCK_V, BLOCK_D, DESCRIBED,
        )  # fmt: skip
        column = start + tl.arange(0, BLOCK_V)
        maximum, second, token, total, weighted = absorb(logits, column, maximum, second, token, total, weighted)
        if SAMPLE:  # noqa: SIM102
            if drawn:
                if SPLIT:  # a quarter of the groups at a time, or their numbers take too many registers
                    left, right = halves_of(logits, BLOCK_C, BLOCK_V // STRIDE, STRIDE)
                    zero, one = halves_of(left, BLOCK_C, BLOCK_V // STRIDE, STRIDE // 2)
                    two, three = halves_of(right, BLOCK_C, BLOCK_V // STRIDE, STRIDE // 2)
                    score, sample, sample_logit = draw_groups(
                        zero, 0, start, keys, row, row_mask, noise, score, sample, sample_logit,
                        BLOCK_C, BLOCK_V // BLOCK, 1,
                    )  # fmt: skip
                    score, sample, sample_logit = draw_groups(
                        one, RUN, start, keys, row, row_mask, noise, score, sample, sample_logit,
                        BLOCK_C, BLOCK_V // BLOCK, 1,
                    )  # fmt: skip
                    score, sample, sample_logit = draw_groups(
                        two, 2 * RUN, start, keys, row, row_mask, noise, score, sample, sample_logit,
                        BLOCK_C, BLOCK_V // BLOCK, 1,
                    )  # fmt: skip
                    score, sample, sample_logit = draw_groups(
                        three, 3 * RUN, start, keys, row, row_mask, noise, score, sample, sample_logit,
                        BLOCK_C, BLOCK_V // BLOCK, 1,
                    )  # fmt: skip
                else:
                    score, sample, sample_logit = draw_groups(
                        logits, 0, start, keys, row, row_mask, noise, score, sample, sample_logit,
                        BLOCK_C, BLOCK_V // BLOCK, STRIDE // RUN,
                    )  # fmt: skip
    if NARROW > 0:
        start = tiles * BLOCK_V + split * NARROW
        logits = logits_of(
            x, narrow_weight, first_row, row, row_mask, start, hidden, vocabulary, x_stride, weight_stride,
            BLOCK_C, NARROW, BLOCK_D, DESCRIBED,
        )  # fmt: skip
        column = start + tl.arange(0, NARROW)
        maximum, second, token, total, weighted = absorb(logits, column, maximum, second, token, total, weighted)
    plane = splits * rows.to(tl.int64)
    place = row * splits + split
    tl.store(integers + place, token, mask=row_mask)
    tl.store(floats + plane + place, maximum, mask=row_mask)
    tl.store(floats + 2 * plane + place, second, mask=row_mask)
    tl.store(floats + 3 * plane + place, total, mask=row_mask)
    tl.store(floats + 4 * plane + place, weighted, mask=row_mask)
    if SAMPLE:
        tl.store(integers + 5 * plane + place, sample, mask=row_mask)
        tl.store(floats + 6 * plane + place, score, mask=row_mask)
        tl.store(floats + 7 * plane + place, sample_logit, mask=row_mask)


@triton.jit
def winner(value, index):
    """Find in every row [C, P] the largest value and, of the entries that have it, the lowest index and where it is."""
    best = tl.max(value, 1)
    lowest = tl.min(tl.where(value == best[:, None], index, LAST), 1)
    return best, lowest, (value == best[:, None]) & (index == lowest[:, None])


@triton.jit(do_not_specialize=["rows", "splits"])
def combine_kernel(
    integers,
    floats,
    temperature,
    token,
    maximum,
    second,
    logsumexp,
    entropy,
    sample,
    sample_logit,
    rows,
    splits,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row_mask = row < rows
    split = tl.arange(0, SPLITS)
    plane = splits * rows.to(tl.int64)
    place = row[:, None] * splits + split[None, :]
    mask = row_mask[:, None] & (split < splits)[None, :]
    best = tl.load(floats + plane + place, mask=mask, other=float("-inf"))
    row_best, at, won = winner(best, tl.load(integers + place, mask=mask, other=LAST))
    runner_up = tl.max(tl.where(won, float("-inf"), best), 1)
    runner_up = tl.maximum(runner_up, tl.max(tl.load(floats + 2 * plane + place, mask=mask, other=float("-inf")), 1))
    total = tl.load(floats + 3 * plane + place, mask=mask, other=0.0)
    weighted = tl.load(floats + 4 * plane + place, mask=mask, other=0.0)
    joined, total, weighted = join(best, total, weighted)
    log_sum, spread = finish(joined, tl.where(row_mask, total, 1.0), weighted)
    tl.store(token + row, at.to(tl.int64), mask=row_mask)
    tl.store(maximum + row, row_best, mask=row_mask)
    tl.store(second + row, runner_up, mask=row_mask)
    tl.store(logsumexp + row, log_sum, mask=row_mask)
    tl.store(entropy + row, spread, mask=row_mask)
    if SAMPLE:
        score = tl.load(floats + 6 * plane + place, mask=mask, other=float("-inf"))
        _, drawn, won = winner(score, tl.load(integers + 5 * plane + place, mask=mask, other=LAST))
        logit = tl.load(floats + 7 * plane + place, mask=mask, other=float("-inf"))
        logit = tl.max(tl.where(won, logit, float("-inf")), 1)
        noisy = tl.load(temperature + row, mask=row_mask, other=0.0) > 0.0
        tl.store(sample + row, tl.where(noisy, drawn, at).to(tl.int64), mask=row_mask)
        tl.store(sample_logit + row, tl.where(noisy, logit, row_best), mask=row_mask)


def launch(
    *, x: Tensor, weight: Tensor, token: Tensor, maximum: Tensor, second: Tensor, logsumexp: Tensor, entropy: Tensor,
    scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the five statistics of the logits of x [C, D] against weight [V, D]."""
    launch_unembedding("unembed_stats", x, weight, (token, maximum, second, logsumexp, entropy), scratch)


def launch_unembedding(
    kernel: str,
    x: Tensor,
    weight: Tensor,
    statistics: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    scratch: Tensor | None,
    sampling: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Launch for unembed_stats; with keys, temperature, sample and sample_logit for unembed_sample."""
    (rows, hidden), vocabulary = x.shape, weight.shape[0]
    if rows == 0:
        return
    sampled = sampling is not None
    token, maximum = statistics[:2]
    keys, temperature, sample, sample_logit = sampling or (token, maximum, token, maximum)  # stand-ins, not touched
    described = has_descriptors(x, weight)
    tile = tile_of(x, sampled, described)
    row_tiles, tiles = triton.cdiv(rows, tile.rows), triton.cdiv(vocabulary, tile.columns)
    # two small programs share a multiprocessor; the registers of a large one, or of one that draws, fill it
    places = processors(x.device) * (1 if sampled or tile.rows * tile.columns >= 1 << 14 else 2)
    splits = min(unembed_splits(row_tiles, places), tiles)
    narrow = 0 if sampled else narrow_columns(tiles, splits, vocabulary, tile.columns)
    floats = floats_of(kernel, scratch, rows * splits * (SAMPLED_PARTIAL_BYTES if sampled else PARTIAL_BYTES) // 4)
    integers = floats.view(torch.int32)
    partial_kernel[(row_tiles * splits,)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.inner]) if described else x,
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.inner]) if described else weight,
        TensorDescriptor.from_tensor(weight, [narrow or tile.columns, tile.inner]) if described else weight,
        keys,
        temperature,
        integers,
        floats,
        x.stride(0),
        weight.stride(0),
        rows,
        hidden,
        vocabulary,
        row_tiles,
        tiles // splits * splits if narrow else tiles,
        splits,
        BLOCK_C=tile.rows,
        BLOCK_V=tile.columns,
        NARROW=narrow,
        BLOCK_D=tile.inner,
        GROUP_ROWS=ROW_TILES,
        DESCRIBED=described,
        SAMPLE=sampled,
        SPLIT=tile.rows * tile.columns > 1024 * tile.warps,
        FLATTENED=described and not sampled and rows > FEW_ROWS,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    parts = power_of_two(splits, COMBINED)
    combine_kernel[(triton.cdiv(rows, COMBINED // parts),)](
        integers,
        floats,
        temperature,
        *statistics,
        sample,
        sample_logit,
        rows,
        splits,
        BLOCK=COMBINED // parts,
        SPLITS=parts,
        SAMPLE=sampled,
        num_warps=4,
    )
