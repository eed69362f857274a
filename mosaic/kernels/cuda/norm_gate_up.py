"""norm_gate_up on CUDA: y = silu(h @ gate.T) * (h @ up.T) with h = rms_norm(x), for few rows.

The norm as in `norm_qkv`; gate, up and their activation stay in float32 until y is written. A program has a tile of columns
of both; there are enough of them, so none is split. Legend: T rows, D hidden, F feed-forward.
"""

from collections.abc import Mapping
from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.few_rows import normed, padded_rows, rows_tile, weight_tile
from mosaic.kernels.cuda.shared.launching import Tile, since, tl, triton
from mosaic.registrar.few_rows import COLUMNS, FEW_ROWS, tile_count

# Most rows, columns, inner width, warps, stages. On an H200, bfloat16, 32 rows of SDAR-8B's twice
# 12,288 columns of 4,096 took 53.5 us; cuBLAS's two products, norm and activation take 62.4, and reading takes 46.8. More tiles
# than two on each processor need a third to fit beside them, in shared memory and in registers: Qwen2.5-7B's 296 took 71.6 us in
# three stages and 90.9 in four.
FLOATS: Final = Tile(FEW_ROWS, COLUMNS, 32, 8, 2)
FEW: Final = Tile(FEW_ROWS, COLUMNS, 64, 4, 4)
MANY: Final = FEW._replace(stages=3)
FEW_TILES: Final = 264
THIRD: Final[Mapping[int, int | None]] = {80: None, 90: 168, 120: None}
"""By architecture, registers of a thread of which three programs have room; before Hopper 64 rows would spill."""
STAGED: Final = {80: True, 100: False, 120: True}
"""By architecture, whether loads run ahead in stages: for sm_100 Triton 3.6 fails on two products of one loop that does so."""


@triton.jit(do_not_specialize=["rows"])
def norm_gate_up_kernel(
    x,
    norm,
    gate,
    up,
    y,
    x_stride,
    gate_stride,
    up_stride,
    y_stride,
    rows,
    columns,
    eps,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    first = tl.program_id(0) * COLUMNS
    gate += first.to(tl.int64) * gate_stride
    up += first.to(tl.int64) * up_stride
    column = first + tl.arange(0, COLUMNS)
    place = tl.minimum(column, columns - 1) - first
    row = tl.arange(0, ROWS)
    x_place = row * x_stride
    gates = tl.zeros([COLUMNS, ROWS], tl.float32)
    ups = tl.zeros([COLUMNS, ROWS], tl.float32)
    squares = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for start in range(0, INNER, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        x_tile = rows_tile(x, x_place, row < rows, inner, INNER, BLOCK_K)
        gate_tile = weight_tile(gate, place * gate_stride, inner, INNER, BLOCK_K)
        up_tile = weight_tile(up, place * up_stride, inner, INNER, BLOCK_K)
        h_tile, squares = normed(x_tile, norm, inner, squares, INNER)
        h_tile = tl.trans(h_tile)
        gates = tl.dot(gate_tile, h_tile, gates, input_precision="ieee")
        ups = tl.dot(up_tile, h_tile, ups, input_precision="ieee")
    inverse = (1.0 / tl.sqrt(tl.sum(squares, 1) / INNER + eps))[None, :]
    z = gates * inverse
    result = z / (1.0 + tl.exp(-z)) * (ups * inverse)
    mask = (column < columns)[:, None] & (row < rows)[None, :]
    tl.store(y + row.to(tl.int64)[None, :] * y_stride + column[:, None], result.to(y.dtype.element_ty), mask=mask)


def launch(
    *, x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, y: Tensor, eps: float, scratch: Tensor | None = None
) -> None:
    """Write silu(h @ gate.T) * (h @ up.T) into y [T, F]."""
    (rows, inner), columns = x.shape, gate.shape[0]
    tiles = tile_count(columns)
    shape = FLOATS if x.element_size() > 2 else FEW if tiles <= FEW_TILES else MANY
    for start in range(0, rows, FEW_ROWS):
        count = min(rows - start, FEW_ROWS)
        norm_gate_up_kernel[(tiles,)](
            x[start:],
            norm,
            gate,
            up,
            y[start:],
            x.stride(0),
            gate.stride(0),
            up.stride(0),
            y.stride(0),
            count,
            columns,
            eps,
            INNER=inner,
            ROWS=padded_rows(count),
            COLUMNS=shape.columns,
            BLOCK_K=shape.inner,
            num_warps=shape.warps,
            num_stages=shape.stages if since(STAGED, x) else 1,
            maxnreg=since(THIRD, x) if shape is MANY else None,
        )
