"""grouped_linear on CUDA: each expert's rows times that expert's weight, all experts in one launch.

Contract: grouped_linear(x[A, I], weight[E, O, I], offsets[E+1] int64) -> y[A, O]; rows [offsets[e], offsets[e+1])
belong to expert e, offsets[E] = A. y overlaps no operand. The offsets stay on the device: the grid has room for a
ragged last tile of every expert, each program finds its expert in the running count of tiles, programs left over
return. Legend: A assignments (rows x top-k), E experts, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import Tile, power_of_two, tile_for, tl, triton
from mosaic.kernels.grouped_linear import reference
from mosaic.kernels.shared.operands import INDEX, check_shapes

__all__ = ["launch", "reference"]

# Untuned defaults by item size, the best of three that were tried on an H200 (16,384 rows of 2,048 over 64 experts of
# 1,024, bfloat16): 376 TFLOP/s, where 64x128 tiles reach 315.
TILES: Final = {2: Tile(128, 128, 64, 8, 3), 4: Tile(64, 64, 32, 8, 2)}


@triton.jit
def grouped_linear_kernel(
    x,
    weight,
    offsets,
    y,
    x_stride,
    weight_stride,
    expert_stride,
    y_stride,
    inner,
    outer,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    tile = tl.program_id(0)
    number = tl.arange(0, BLOCK_E)
    begin = tl.load(offsets + number, mask=number < EXPERTS, other=0)
    end = tl.load(offsets + number + 1, mask=number < EXPERTS, other=0)
    tiles = ((end - begin + BLOCK_A - 1) // BLOCK_A).to(tl.int32)
    passed = tl.cumsum(tiles, 0) <= tile  # experts whose tiles all come before this one
    expert = tl.sum(passed.to(tl.int32), 0)
    if expert < EXPERTS:
        within = tile - tl.sum(tl.where(passed, tiles, 0), 0)
        first = tl.load(offsets + expert) + within.to(tl.int64) * BLOCK_A
        row = first + tl.arange(0, BLOCK_A)
        row_mask = row < tl.load(offsets + expert + 1)
        column = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
        column_mask = column < outer
        depth = tl.arange(0, BLOCK_I)
        x_place = x + row[:, None] * x_stride + depth[None, :]
        weight_place = weight + expert.to(tl.int64) * expert_stride
        weight_place = weight_place + column[None, :].to(tl.int64) * weight_stride + depth[:, None]
        total = tl.zeros([BLOCK_A, BLOCK_O], tl.float32)
        for start in range(0, inner, BLOCK_I):
            inside = depth < inner - start
            x_tile = tl.load(x_place + start, mask=row_mask[:, None] & inside[None, :], other=0.0)
            weight_tile = tl.load(weight_place + start, mask=inside[:, None] & column_mask[None, :], other=0.0)
            total = tl.dot(x_tile, weight_tile, total, input_precision="ieee")
        mask = row_mask[:, None] & column_mask[None, :]
        tl.store(y + row[:, None] * y_stride + column[None, :], total.to(y.dtype.element_ty), mask=mask)


def launch(*, x: Tensor, weight: Tensor, offsets: Tensor, y: Tensor, scratch: Tensor | None = None) -> None:
    """Write every expert's product into y [A, O]."""
    (rows, inner), (experts, outer, _), dtype = x.shape, weight.shape, x.dtype
    check_shapes(
        "grouped_linear",
        x=(x, (rows, inner), None),
        weight=(weight, (experts, outer, inner), dtype),
        offsets=(offsets, (experts + 1,), INDEX[0]),
        y=(y, (rows, outer), dtype),
    )
    tile = tile_for(TILES, x)
    # sum of ceil(n_e / BLOCK) <= rows / BLOCK + E; no expert has more tiles than rows
    tiles = min(triton.cdiv(rows, tile.rows) + experts - 1, rows)
    grouped_linear_kernel[(tiles, triton.cdiv(outer, tile.columns))](
        x,
        weight,
        offsets,
        y,
        x.stride(0),
        weight.stride(1),
        weight.stride(0),
        y.stride(0),
        inner,
        outer,
        EXPERTS=experts,
        BLOCK_E=power_of_two(experts, 1 << 16),
        BLOCK_A=tile.rows,
        BLOCK_O=tile.columns,
        BLOCK_I=tile.inner,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
