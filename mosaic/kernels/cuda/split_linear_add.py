"""split_linear_add on CUDA: y += x @ weight.T for few rows, split over inputs.

Sums of the splits are float32, and added in order by the last of a tile to arrive, so they are the same whenever it is asked.
Legend: T rows, I inputs, O outputs, A counts.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.few_rows import joined, padded_rows, partials_of, rows_tile, split_of, weight_tile
from mosaic.kernels.cuda.shared.launching import Tile, since, tile_for, tl, triton
from mosaic.registrar.few_rows import COLUMNS, FEW_ROWS, split_count, tile_count
from mosaic.registrar.operators.split_linear_add import PROGRAMS

# By architecture and item size: most rows, columns, inner width, warps, stages. On an H200, bfloat16, 32 rows of SDAR-8B: 4,096
# columns of 4,096 took 12.1 us in two splits and 12.7 in four, cuBLAS 13.8, reading 7.8; of 12,288, 28.7, 29.4, 30.6 and 23.4.
FLOATS: Final = Tile(FEW_ROWS, COLUMNS, 32, 8, 2)
SMALL: Final = {2: Tile(FEW_ROWS, COLUMNS, 64, 4, 4), 4: FLOATS}
HOPPER: Final = {2: Tile(FEW_ROWS, COLUMNS, 128, 4, 5), 4: FLOATS}
TILES: Final = {80: SMALL, 90: HOPPER, 120: SMALL}


@triton.jit(do_not_specialize=["rows"])
def split_linear_add_kernel(
    x,
    weight,
    y,
    partials,
    arrivals,
    x_stride,
    weight_stride,
    y_stride,
    rows,
    columns,
    INNER: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(0)
    split = tl.program_id(1)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    weight += (tile * COLUMNS).to(tl.int64) * weight_stride
    row = tl.arange(0, ROWS)
    x_place = row * x_stride
    weight_place = (tl.minimum(column, columns - 1) - tile * COLUMNS) * weight_stride
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(split * SHARE, tl.minimum((split + 1) * SHARE, INNER), BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        x_tile = rows_tile(x, x_place, row < rows, inner, INNER, BLOCK_K)
        w_tile = weight_tile(weight, weight_place, inner, INNER, BLOCK_K)
        sums = tl.dot(w_tile, tl.trans(x_tile), sums, input_precision="ieee")
    last = True
    if SPLITS > 1:
        sums, _, last = joined(
            sums, sums, partials, arrivals, tile, tl.num_programs(0), split, SPLITS, False, ROWS, COLUMNS
        )
    if last:
        place = y + row.to(tl.int64)[None, :] * y_stride + column[:, None]
        mask = (column < columns)[:, None] & (row < rows)[None, :]
        result = sums + tl.load(place, mask=mask, other=0.0).to(tl.float32)
        tl.store(place, result.to(y.dtype.element_ty), mask=mask)


def launch(*, x: Tensor, weight: Tensor, y: Tensor, arrivals: Tensor, scratch: Tensor | None = None) -> None:
    """Add x @ weight.T to y [T, O] in place; arrivals are 0 before and after."""
    (rows, inner), columns, shape = x.shape, weight.shape[0], tile_for(since(TILES, x), x)
    tiles = tile_count(columns)
    planned = split_count(tiles, inner, PROGRAMS)
    partials = partials_of("split_linear_add", scratch, x, tiles, planned)
    split = split_of(planned, inner, shape.inner)
    for start in range(0, rows, FEW_ROWS):
        count = min(rows - start, FEW_ROWS)
        split_linear_add_kernel[(tiles, split.shares)](
            x[start:],
            weight,
            y[start:],
            partials,
            arrivals,
            x.stride(0),
            weight.stride(0),
            y.stride(0),
            count,
            columns,
            INNER=inner,
            SPLITS=split.shares,
            SHARE=split.inputs,
            ROWS=padded_rows(count),
            COLUMNS=shape.columns,
            BLOCK_K=shape.inner,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
