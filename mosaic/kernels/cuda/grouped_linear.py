"""grouped_linear on CUDA: each expert's rows times that expert's weight, all experts in one launch.

y overlaps no operand. The offsets stay on the device: the grid has room for a ragged last tile of every expert, each program
finds its expert by one comparison with the offsets, programs left over return. Products are computed transposed, because
tensor cores take few rows as columns without waste. Programs that run side by side share an expert's rows and weight in the
L2 cache. All tiles of an item size add up inputs in the same steps, so a row's result depends on no other row. Legend: A
assignments (rows x top-k), E experts, I inputs, O outputs.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import (
    TensorDescriptor,
    Tile,
    has_descriptors,
    power_of_two,
    tile_for,
    tl,
    triton,
)

# Tiles by the average expert's rows, from the first entry that has as many on, and the rows up to which an expert's last
# tile is multiplied as one of no more. By item size where loads go by address; all of a size have the same `inner`.
# Measured with descriptors on an H200 (256 experts of 512, hidden 2,048, bfloat16, rows at random; gate, down): 268 rows
# an expert 285 and 353 us, 504 TFLOP/s for the gate (128x128x64 303 and 343); 27 rows 138 and 136 us, weights read at
# 4.2 TB/s; 2 rows 96 and 97 us. A kernel by address, not transposed, took 439 and 489, 165 and 180, 109 and 128 us. The
# borders lie between the measured rows. Tiles by address are not timed since products are transposed.
POINTER_TILES: Final = {
    0: ({2: Tile(32, 128, 64, 4, 3), 4: Tile(32, 64, 32, 4, 2)}, 16),
    64: ({2: Tile(128, 128, 64, 8, 3), 4: Tile(64, 64, 32, 8, 2)}, 32),
}
DESCRIPTOR_TILES: Final = {
    0: ({2: Tile(16, 128, 64, 4, 6)}, 16),
    8: ({2: Tile(64, 128, 64, 4, 3)}, 16),
    96: ({2: Tile(128, 256, 64, 8, 4)}, 64),
}


@triton.jit
def multiply_tile(
    x, weight, y, first, end, expert, column, x_stride, weight_stride, expert_stride, y_stride, inner, outer,
    BLOCK_A: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Write one expert's rows [first, end), of which a tile has room for BLOCK_A, times BLOCK_O rows of its weight."""
    row = first + tl.arange(0, BLOCK_A)
    row_mask = row < end
    output = column + tl.arange(0, BLOCK_O)
    output_mask = output < outer
    depth = tl.arange(0, BLOCK_I)
    if not DESCRIBED:
        x_place = x + row[None, :] * x_stride + depth[:, None]
        weight_place = weight + expert.to(tl.int64) * expert_stride
        weight_place = weight_place + output[:, None].to(tl.int64) * weight_stride + depth[None, :]
    total = tl.zeros([BLOCK_O, BLOCK_A], tl.float32)
    for start in range(0, inner, BLOCK_I):
        if DESCRIBED:  # what lies behind the rows of this expert, or of its weight, is not stored
            weight_tile = weight.load([expert * outer + column, start])
            x_tile = x.load([first.to(tl.int32), start]).T
        else:
            inside = depth < inner - start
            weight_tile = tl.load(weight_place + start, mask=output_mask[:, None] & inside[None, :], other=0.0)
            x_tile = tl.load(x_place + start, mask=inside[:, None] & row_mask[None, :], other=0.0)
        total = tl.dot(weight_tile, x_tile, total, input_precision="ieee")
    mask = row_mask[:, None] & output_mask[None, :]
    tl.store(y + row[:, None] * y_stride + output[None, :], total.to(y.dtype.element_ty).T, mask=mask)


@triton.jit
def grouped_linear_kernel(
    x,
    few_x,
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
    FEW_A: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    columns = tl.cdiv(outer, BLOCK_O)
    tile = tl.program_id(0) // columns
    column = tl.program_id(0) % columns * BLOCK_O
    # Expert e has the tiles from begin_e // BLOCK_A + e on: as many as its rows need, or one more.
    number = tl.arange(0, BLOCK_E)
    begin = tl.load(offsets + number, mask=number < EXPERTS, other=0)
    starts = (number < EXPERTS) & (begin // BLOCK_A + number <= tile)
    expert = tl.sum(starts.to(tl.int32), 0) - 1
    begin_row = tl.load(offsets + expert)
    first = begin_row + (tile - begin_row // BLOCK_A - expert) * BLOCK_A
    end = tl.load(offsets + expert + 1)
    if end - first > FEW_A:
        multiply_tile(
            x, weight, y, first, end, expert, column, x_stride, weight_stride, expert_stride, y_stride, inner, outer,
            BLOCK_A, BLOCK_O, BLOCK_I, DESCRIBED,
        )  # fmt: skip
    elif end > first:
        multiply_tile(
            few_x, weight, y, first, end, expert, column, x_stride, weight_stride, expert_stride, y_stride, inner, outer,
            FEW_A, BLOCK_O, BLOCK_I, DESCRIBED,
        )  # fmt: skip


def tile_of(x: Tensor, experts: int, described: bool) -> tuple[Tile, int]:
    """Choose the tile for the average expert's rows, and the rows of a last tile that has few."""
    tables = DESCRIPTOR_TILES if described else POINTER_TILES
    by_size, few = tables[max(least for least in tables if least * experts <= x.shape[0])]
    return tile_for(by_size, x), few


def launch(*, x: Tensor, weight: Tensor, offsets: Tensor, y: Tensor, scratch: Tensor | None = None) -> None:
    """Write every expert's product into y [A, O]."""
    (rows, inner), (experts, outer, _) = x.shape, weight.shape
    described = weight.stride(0) == outer * weight.stride(1) and has_descriptors(x, weight[0])
    tile, few = tile_of(x, experts, described)
    lines = weight.as_strided((experts * outer, inner), (weight.stride(1), 1)) if described else weight
    # the last expert's tiles start at most at rows // tile.rows + experts - 1
    tiles = rows // tile.rows + experts
    grouped_linear_kernel[(tiles * triton.cdiv(outer, tile.columns),)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.inner]) if described else x,
        TensorDescriptor.from_tensor(x, [few, tile.inner]) if described else x,
        TensorDescriptor.from_tensor(lines, [tile.columns, tile.inner]) if described else weight,
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
        FEW_A=few,
        BLOCK_O=tile.columns,
        BLOCK_I=tile.inner,
        DESCRIBED=described,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
