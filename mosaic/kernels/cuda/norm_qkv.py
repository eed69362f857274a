"""norm_qkv on CUDA: q, k and v = rms_norm(x) @ weight.T (+ bias), for few rows.

x times the norm's weight is rounded to its dtype and multiplied, while squares are added up; sums are divided by the norm in
the end, in float32. A program has a tile of columns of one of the three, and a split of its inputs. Legend: T rows, D hidden,
Q and K columns of queries and of keys, A counts.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.few_rows import (
    joined,
    normed,
    padded_rows,
    partials_of,
    rows_tile,
    split_of,
    weight_tile,
)
from mosaic.kernels.cuda.shared.launching import Tile, tl, triton
from mosaic.registrar.few_rows import COLUMNS, FEW_ROWS, split_count, tile_count
from mosaic.registrar.operators.norm_qkv import PROGRAMS

# Most rows, columns, inner width, warps, stages. On an H200, bfloat16, 32 rows of SDAR-8B's 6,144
# columns of 4,096 took 18.5 us in four splits, and 19.1 in two with six stages; cuBLAS's three products and the norm take 32.6, and
# reading takes 11.7. The norm inside costs 2.6 of them.
FLOATS: Final = Tile(FEW_ROWS, COLUMNS, 32, 8, 2)
HALVES: Final = Tile(FEW_ROWS, COLUMNS, 64, 4, 4)


@triton.jit(do_not_specialize=["rows"])
def norm_qkv_kernel(
    x,
    norm,
    q_weight,
    k_weight,
    v_weight,
    q_bias,
    k_bias,
    v_bias,
    q,
    k,
    v,
    partials,
    arrivals,
    x_stride,
    q_weight_stride,
    k_weight_stride,
    v_weight_stride,
    q_stride,
    k_stride,
    v_stride,
    rows,
    q_columns,
    k_columns,
    eps,
    INNER: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARE: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(0)
    split = tl.program_id(1)
    q_tiles = tl.cdiv(q_columns, COLUMNS)
    k_tiles = tl.cdiv(k_columns, COLUMNS)
    weight, bias, y, weight_stride, y_stride, columns = q_weight, q_bias, q, q_weight_stride, q_stride, q_columns
    at = tile
    if tile >= q_tiles + k_tiles:
        weight, bias, y, weight_stride, y_stride, columns = v_weight, v_bias, v, v_weight_stride, v_stride, k_columns
        at = tile - q_tiles - k_tiles
    elif tile >= q_tiles:
        weight, bias, y, weight_stride, y_stride, columns = k_weight, k_bias, k, k_weight_stride, k_stride, k_columns
        at = tile - q_tiles
    column = at * COLUMNS + tl.arange(0, COLUMNS)
    weight += (at * COLUMNS).to(tl.int64) * weight_stride
    row = tl.arange(0, ROWS)
    x_place = row * x_stride
    weight_place = (tl.minimum(column, columns - 1) - at * COLUMNS) * weight_stride
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    squares = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for start in range(split * SHARE, tl.minimum((split + 1) * SHARE, INNER), BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        x_tile = rows_tile(x, x_place, row < rows, inner, INNER, BLOCK_K)
        w_tile = weight_tile(weight, weight_place, inner, INNER, BLOCK_K)
        h_tile, squares = normed(x_tile, norm, inner, squares, INNER)
        sums = tl.dot(w_tile, tl.trans(h_tile), sums, input_precision="ieee")
    total = tl.sum(squares, 1)
    last = True
    if SPLITS > 1:
        sums, total, last = joined(
            sums, total, partials, arrivals, tile, tl.num_programs(0), split, SPLITS, True, ROWS, COLUMNS
        )
    if last:
        result = sums * (1.0 / tl.sqrt(total / INNER + eps))[None, :]
        if BIAS:
            result += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[:, None]
        mask = (column < columns)[:, None] & (row < rows)[None, :]
        tl.store(y + row.to(tl.int64)[None, :] * y_stride + column[:, None], result.to(y.dtype.element_ty), mask=mask)


def launch(
    *, x: Tensor, norm: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor, arrivals: Tensor, q: Tensor,
    k: Tensor, v: Tensor, eps: float, q_bias: Tensor | None = None, k_bias: Tensor | None = None,
    v_bias: Tensor | None = None, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write q [T, Q], k and v [T, K]; arrivals are 0 before and after."""
    rows, inner = x.shape
    q_columns, k_columns = q_weight.shape[0], k_weight.shape[0]
    tiles, shape = tile_count(q_columns, k_columns, k_columns), FLOATS if x.element_size() > 2 else HALVES
    planned = split_count(tiles, inner, PROGRAMS)
    partials = partials_of("norm_qkv", scratch, x, tiles, planned)
    split = split_of(planned, inner, shape.inner)
    for start in range(0, rows, FEW_ROWS):
        count = min(rows - start, FEW_ROWS)
        norm_qkv_kernel[(tiles, split.shares)](
            x[start:],
            norm,
            q_weight,
            k_weight,
            v_weight,
            q if q_bias is None else q_bias,
            k if k_bias is None else k_bias,
            v if v_bias is None else v_bias,
            q[start:],
            k[start:],
            v[start:],
            partials,
            arrivals,
            x.stride(0),
            q_weight.stride(0),
            k_weight.stride(0),
            v_weight.stride(0),
            q.stride(0),
            k.stride(0),
            v.stride(0),
            count,
            q_columns,
            k_columns,
            eps,
            INNER=inner,
            SPLITS=split.shares,
            SHARE=split.inputs,
            BIAS=q_bias is not None,
            ROWS=padded_rows(count),
            COLUMNS=shape.columns,
            BLOCK_K=shape.inner,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
