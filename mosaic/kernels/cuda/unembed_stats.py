"""unembed_stats on CUDA: the statistics of x @ weight.T, whose rows of logits never exist.

Contract: unembed_stats(x[C, D], weight[V, D]) -> token[C] int64 (argmax, ties to the lower index), maximum[C],
second[C], logsumexp[C], entropy[C], float32. The vocabulary is split: a program keeps the statistics of a tile of rows
over its part, tile by tile, as partials in scratch; a second kernel joins a row's partials. No atomics: the same
input gives the same bits. Scratch: [splits, C] int64 tokens, then [4, splits, C] float32. Legend: C rows, D hidden, V
vocabulary.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mosaic.errors import RuntimeMemoryError
from mosaic.kernels._operands import check_shapes
from mosaic.kernels._statistics import check_outputs
from mosaic.kernels.cuda._statistics import absorb, finish
from mosaic.kernels.cuda._triton import Tile, tile_for, tl, triton
from mosaic.kernels.unembed_stats import reference
from mosaic.registrar.implementations.cuda import PARTIAL_BYTES, UNEMBED_ROWS, unembed_splits

__all__ = ["launch", "reference"]

# Untuned defaults by item size, the best of five that were tried on an H200 and spill on no card (D 4,096, V 126,464,
# bfloat16): 2,048 rows 4.6 ms, where 64x128 tiles with 8 warps take 7.4 and cuBLAS's bare product 3.0; 32 rows 0.28 ms
# with the short tile, where cuBLAS takes 0.25.
TILES: Final = {2: Tile(128, 128, 64, 8, 3), 4: Tile(64, 64, 32, 8, 2)}
SHORT: Final = {2: Tile(UNEMBED_ROWS, 128, 64, 8, 4), 4: Tile(UNEMBED_ROWS, 64, 32, 8, 2)}
COMBINED: Final = 1024  # partials in one tile of the second kernel


@triton.jit(do_not_specialize=["rows", "tiles_per_split"])
def partial_kernel(
    x,
    weight,
    token,
    partial,
    x_stride,
    weight_stride,
    rows,
    hidden,
    vocabulary,
    tiles_per_split,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
):
    split = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    row_mask = row < rows
    inner = tl.arange(0, BLOCK_D)
    maximum = tl.full([BLOCK_C], float("-inf"), tl.float32)
    second = tl.full([BLOCK_C], float("-inf"), tl.float32)
    index = tl.zeros([BLOCK_C], tl.int32)
    total = tl.zeros([BLOCK_C], tl.float32)
    weighted = tl.zeros([BLOCK_C], tl.float32)
    begin = split * tiles_per_split * BLOCK_V
    for start in range(begin, tl.minimum(begin + tiles_per_split * BLOCK_V, vocabulary), BLOCK_V):
        column = start + tl.arange(0, BLOCK_V)
        column_mask = column < vocabulary
        x_place = x + row[:, None] * x_stride + inner[None, :]
        weight_place = weight + column[None, :].to(tl.int64) * weight_stride + inner[:, None]
        logits = tl.zeros([BLOCK_C, BLOCK_V], tl.float32)
        for depth in range(0, hidden, BLOCK_D):
            inside = inner < hidden - depth
            x_tile = tl.load(x_place + depth, mask=row_mask[:, None] & inside[None, :], other=0.0)
            weight_tile = tl.load(weight_place + depth, mask=inside[:, None] & column_mask[None, :], other=0.0)
            logits = tl.dot(x_tile, weight_tile, logits, input_precision="ieee")
        logits = tl.where(column_mask[None, :], logits, float("-inf"))
        maximum, second, index, total, weighted = absorb(logits, column, maximum, second, index, total, weighted)
    place = split.to(tl.int64) * rows + row
    plane = SPLITS * rows.to(tl.int64)
    tl.store(token + place, index.to(tl.int64), mask=row_mask)
    tl.store(partial + place, maximum, mask=row_mask)
    tl.store(partial + plane + place, second, mask=row_mask)
    tl.store(partial + 2 * plane + place, total, mask=row_mask)
    tl.store(partial + 3 * plane + place, weighted, mask=row_mask)


@triton.jit(do_not_specialize=["rows"])
def combine_kernel(
    partial_token,
    partial,
    token,
    maximum,
    second,
    logsumexp,
    entropy,
    rows,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row_mask = row < rows
    split = tl.arange(0, SPLITS)
    plane = SPLITS * rows.to(tl.int64)
    place = split[None, :].to(tl.int64) * rows + row[:, None]
    mask = row_mask[:, None] & (split >= 0)[None, :]
    best = tl.load(partial + place, mask=mask, other=0.0)
    maximum_all = tl.max(best, 1)
    # the first split that has it: splits come in ascending order, so a tie keeps the earlier column
    winner = tl.min(tl.where(best == maximum_all[:, None], split[None, :], SPLITS), 1)
    won = split[None, :] == winner[:, None]
    index = tl.sum(tl.where(won, tl.load(partial_token + place, mask=mask, other=0), 0), 1)
    runner_up = tl.max(tl.where(won, float("-inf"), best), 1)
    runner_up = tl.maximum(runner_up, tl.max(tl.load(partial + plane + place, mask=mask, other=0.0), 1))
    base = tl.maximum(maximum_all, -3.4028234663852886e38)
    shift = tl.maximum(best - base[:, None], -200.0)
    scale = tl.exp(shift)
    total = tl.load(partial + 2 * plane + place, mask=mask, other=1.0)
    weighted = tl.load(partial + 3 * plane + place, mask=mask, other=0.0)
    log_sum, spread = finish(maximum_all, tl.sum(total * scale, 1), tl.sum((weighted + total * shift) * scale, 1))
    tl.store(token + row, index, mask=row_mask)
    tl.store(maximum + row, maximum_all, mask=row_mask)
    tl.store(second + row, runner_up, mask=row_mask)
    tl.store(logsumexp + row, log_sum, mask=row_mask)
    tl.store(entropy + row, spread, mask=row_mask)


def launch(
    *,
    x: Tensor,
    weight: Tensor,
    token: Tensor,
    maximum: Tensor,
    second: Tensor,
    logsumexp: Tensor,
    entropy: Tensor,
    scratch: Tensor | None = None,
) -> None:
    """Write the five statistics of the logits of x [C, D] against weight [V, D]."""
    (rows, hidden), vocabulary = x.shape, weight.shape[0]
    check_shapes("unembed_stats", x=(x, (rows, hidden), None), weight=(weight, (vocabulary, hidden), x.dtype))
    check_outputs("unembed_stats", rows, token, maximum, second, logsumexp, entropy)
    splits = unembed_splits(rows)
    partial_token, partial = _partials(scratch, rows * splits)
    tile, combined = tile_for(TILES if rows > UNEMBED_ROWS else SHORT, x), COMBINED // splits
    partial_kernel[(triton.cdiv(rows, tile.rows), splits)](
        x,
        weight,
        partial_token,
        partial,
        x.stride(0),
        weight.stride(0),
        rows,
        hidden,
        vocabulary,
        triton.cdiv(triton.cdiv(vocabulary, tile.columns), splits),
        BLOCK_C=tile.rows,
        BLOCK_V=tile.columns,
        BLOCK_D=tile.inner,
        SPLITS=splits,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    combine_kernel[(triton.cdiv(rows, combined),)](
        partial_token,
        partial,
        token,
        maximum,
        second,
        logsumexp,
        entropy,
        rows,
        BLOCK=combined,
        SPLITS=splits,
        num_warps=4,
    )


def _partials(scratch: Tensor | None, partials: int) -> tuple[Tensor, Tensor]:
    """View the scratch buffer as tokens and as the four float planes."""
    tokens_bytes, needed = 8 * partials, PARTIAL_BYTES * partials
    available = 0 if scratch is None else scratch.numel()
    if scratch is None or available < needed:
        raise RuntimeMemoryError(
            f"unembed_stats: scratch of {available:,} bytes, {needed:,} needed: give the plan's scratch buffer, sized "
            "by SCRATCH['unembed_stats']."
        )
    return scratch[:tokens_bytes].view(torch.int64), scratch[tokens_bytes:needed].view(torch.float32)
