"""row_stats on CUDA: what a sampler needs of each row of logits, in one pass over the vocabulary.

Contract: row_stats(logits[C, V]) -> token[C] int64 (argmax, ties to the lower index), maximum[C], second[C] (second
largest logit), logsumexp[C], entropy[C] (natural logarithm), float32. The logits are read only. One program a row; no
scratch. Legend: C rows, V vocabulary.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from mosaic.kernels._operands import check_shapes
from mosaic.kernels._statistics import check_outputs
from mosaic.kernels.cuda._statistics import absorb, finish
from mosaic.kernels.cuda._triton import power_of_two, tl, triton
from mosaic.kernels.row_stats import reference

__all__ = ["launch", "reference"]

# Untuned defaults: 16 logits a thread and reduction.
COLUMNS: Final = 4096
WARPS: Final = 8


@triton.jit
def row_stats_kernel(logits, token, maximum, second, logsumexp, entropy, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    # a tile of one row, as the statistics are written for tiles
    best = tl.full([1], float("-inf"), tl.float32)
    runner_up = tl.full([1], float("-inf"), tl.float32)
    index = tl.zeros([1], tl.int32)
    total = tl.zeros([1], tl.float32)
    weighted = tl.zeros([1], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        place = logits + row * stride + column[None, :]
        tile = tl.load(place, mask=(column < columns)[None, :], other=float("-inf")).to(tl.float32)
        best, runner_up, index, total, weighted = absorb(tile, column, best, runner_up, index, total, weighted)
    log_sum, spread = finish(best, total, weighted)
    one = row + tl.arange(0, 1)
    tl.store(token + one, index.to(tl.int64))
    tl.store(maximum + one, best)
    tl.store(second + one, runner_up)
    tl.store(logsumexp + one, log_sum)
    tl.store(entropy + one, spread)


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
    rows, vocabulary = logits.shape
    check_shapes("row_stats", logits=(logits, (rows, vocabulary), None))
    check_outputs("row_stats", rows, token, maximum, second, logsumexp, entropy)
    row_stats_kernel[(rows,)](
        logits,
        token,
        maximum,
        second,
        logsumexp,
        entropy,
        logits.stride(0),
        vocabulary,
        BLOCK=power_of_two(vocabulary, COLUMNS),
        num_warps=WARPS,
    )
