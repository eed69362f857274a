"""linear and linear_add on CUDA whose rows' bits do not depend on the other rows or their number.

One program adds up all inputs of its outputs, in order, in float32; then bias or residual, then one rounding. So tiles
differ in speed alone: on one H200 ten of them gave equal bits, those of `grouped_linear` too. The products of a layer
of SDAR-8B took 136 us there for 64 rows where cuBLAS took 131, 209 for 256 where it took 175, 1,094 for 2,048 where it
took 988. Legend: T rows, I inputs, O outputs.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import TensorDescriptor, Tile, has_descriptors, tile_for, tl, triton

# Rows and outputs up to which a tile is taken, where loads go by descriptor: the fastest of the H200 at the measured sizes.
DESCRIPTOR_TILES: Final = (
    (64, 4096, Tile(64, 32, 128, 4, 5)),
    (64, 8192, Tile(64, 64, 128, 4, 4)),
    (64, 0, Tile(64, 128, 64, 4, 5)),
    (128, 2048, Tile(64, 32, 128, 4, 5)),
    (128, 4096, Tile(64, 64, 128, 4, 4)),
    (512, 4096, Tile(128, 64, 128, 4, 4)),
    (128, 0, Tile(128, 128, 64, 4, 4)),
    (512, 0, Tile(256, 128, 64, 8, 4)),
    (0, 2048, Tile(128, 128, 64, 8, 4)),
    (0, 8192, Tile(256, 128, 64, 8, 4)),
    (0, 0, Tile(128, 128, 64, 8, 4)),
)
POINTER_TILES: Final = {2: Tile(64, 64, 64, 4, 3), 4: Tile(64, 64, 32, 4, 2)}
"""By item size, where loads go by address. Not timed."""


@triton.jit(do_not_specialize=["rows"])
def invariant_linear_kernel(
    x, weight, added, y, x_stride, weight_stride, added_stride, y_stride, rows, outer, inner,
    ADDS: tl.constexpr, DESCRIBED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    # programs side by side share a tile of the weight in the L2 cache
    row_tiles = tl.cdiv(rows, BLOCK_T)
    first_row = tl.program_id(0) % row_tiles * BLOCK_T
    first_output = tl.program_id(0) // row_tiles * BLOCK_O
    row = first_row.to(tl.int64) + tl.arange(0, BLOCK_T)
    output = first_output.to(tl.int64) + tl.arange(0, BLOCK_O)
    depth = tl.arange(0, BLOCK_I)
    total = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    for start in range(0, inner, BLOCK_I):
        if DESCRIBED:
            x_tile = x.load([first_row, start])
            weight_tile = weight.load([first_output, start])
        else:
            inside = (depth < inner - start)[None, :]
            x_place = x + row[:, None] * x_stride + start + depth[None, :]
            weight_place = weight + output[:, None] * weight_stride + start + depth[None, :]
            x_tile = tl.load(x_place, mask=(row < rows)[:, None] & inside, other=0.0)
            weight_tile = tl.load(weight_place, mask=(output < outer)[:, None] & inside, other=0.0)
        total = tl.dot(x_tile, weight_tile.T, total, input_precision="ieee")
    mask = (row < rows)[:, None] & (output < outer)[None, :]
    if ADDS:
        place = added + row[:, None] * added_stride + output[None, :]
        total += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row[:, None] * y_stride + output[None, :], total.to(y.dtype.element_ty), mask=mask)


def launch(*, x: Tensor, weight: Tensor, y: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None) -> None:
    """Write x @ weight.T + bias into y [T, O]."""
    _launch("linear", x, weight, y, bias, 0)


def launch_add(*, x: Tensor, weight: Tensor, y: Tensor, scratch: Tensor | None = None) -> None:
    """Add x @ weight.T to y [T, O] in place."""
    _launch("linear_add", x, weight, y, y, y.stride(0))


def _launch(kernel: str, x: Tensor, weight: Tensor, y: Tensor, added: Tensor | None, added_stride: int) -> None:
    (rows, inner), outer = x.shape, weight.shape[0]
    described = has_descriptors(x, weight)
    tile = tile_of(rows, outer) if described else tile_for(POINTER_TILES, x)
    invariant_linear_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(outer, tile.columns),)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.inner]) if described else x,
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.inner]) if described else weight,
        y if added is None else added,
        y,
        x.stride(0),
        weight.stride(0),
        added_stride,
        y.stride(0),
        rows,
        outer,
        inner,
        ADDS=added is not None,
        DESCRIBED=described,
        BLOCK_T=tile.rows,
        BLOCK_O=tile.columns,
        BLOCK_I=tile.inner,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def tile_of(rows: int, outer: int) -> Tile:
    """Choose the tile of a product by descriptors."""
    return next(
        tile
        for most_rows, most_outer, tile in DESCRIPTOR_TILES
        if (rows <= most_rows or not most_rows) and (outer <= most_outer or not most_outer)
    )
