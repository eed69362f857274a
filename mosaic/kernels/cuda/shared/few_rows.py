"""Products of few rows on CUDA: tiles of weights stream through the processors, each multiplied by all rows.

`mosaic.registrar.few_rows` describes how weights are cut. A tile of weights is the left operand of the matrix units and
the rows, transposed, are the right one: so Hopper's tensor cores, which take at least 64 rows, are full with any number
of rows. Inputs are added up in order, so a row's result depends on no other row.
"""

from typing import NamedTuple

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import DOT_MINIMUM, power_of_two, tl, triton
from mosaic.kernels.cuda.shared.scratch import floats_of
from mosaic.registrar.few_rows import FEW_ROWS, partial_floats


class Split(NamedTuple):
    """How the inputs of a tile are split: into `shares` of `inputs` each, the last of which may be shorter."""

    shares: int
    inputs: int


def split_of(count: int, inner: int, block: int) -> Split:
    """Split `inner` inputs into at most `count` shares of whole blocks.

    >>> split_of(3, 12288, 64), split_of(3, 130, 64)
    (Split(shares=3, inputs=4096), Split(shares=3, inputs=64))
    """
    inputs = -(-inner // (count * block)) * block
    return Split(-(-inner // inputs), inputs)


def padded_rows(rows: int) -> int:
    """Round rows up to what a tile has."""
    return power_of_two(rows, FEW_ROWS, least=DOT_MINIMUM)


def partials_of(kernel: str, scratch: Tensor | None, x: Tensor, tiles: int, splits: int) -> Tensor:
    """View scratch as the partial results of all splits; x itself where there is one split, which leaves none."""
    count = partial_floats(tiles, splits)
    return floats_of(kernel, scratch, count) if count else x


@triton.jit
def weight_tile(weight, place, inner, INNER: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile [columns, inner] of a weight; `place` is where columns begin."""
    if INNER % BLOCK_K == 0:
        tile = tl.load(weight + place[:, None] + inner[None, :])
    else:
        tile = tl.load(weight + place[:, None] + inner[None, :], mask=(inner < INNER)[None, :], other=0.0)
    return tile


@triton.jit
def rows_tile(x, place, there, inner, INNER: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile [rows, inner] of x; `place` is where rows begin, and rows that are not `there` are 0."""
    if INNER % BLOCK_K == 0:
        tile = tl.load(x + place[:, None] + inner[None, :], mask=there[:, None], other=0.0)
    else:
        tile = tl.load(x + place[:, None] + inner[None, :], mask=there[:, None] & (inner < INNER)[None, :], other=0.0)
    return tile


@triton.jit
def normed(tile, norm, inner, squares, INNER: tl.constexpr):
    """A tile of rows times the norm's weight, in the rows' dtype; and the sums of squares [rows, inner] so far."""
    value = tile.to(tl.float32)
    scale = tl.load(norm + inner, mask=inner < INNER, other=0.0).to(tl.float32)
    return (value * scale[None, :]).to(tile.dtype), squares + value * value


@triton.jit
def joined(
    sums,
    squares,
    partials,
    arrivals,
    tile,
    tiles,
    split,
    SPLITS: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Leave a split's sums [columns, rows], and of squares [rows]; whether it is the last to, and if so those of all, added in
    order."""
    SIZE: tl.constexpr = ROWS * COLUMNS
    row = tl.arange(0, ROWS)
    place = tl.arange(0, COLUMNS)[:, None] * ROWS + row[None, :]
    mine = partials + tile * SPLITS * SIZE
    more = partials + tiles * SPLITS * SIZE + tile * SPLITS * ROWS
    tl.store(mine + split * SIZE + place, sums, cache_modifier=".cg")
    if NORM:
        tl.store(more + split * ROWS + row, squares, cache_modifier=".cg")
    tl.debug_barrier()  # all threads have stored before one of them says so
    last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    tl.debug_barrier()
    if last:
        sums = tl.load(mine + place, cache_modifier=".cg")
        if NORM:
            squares = tl.load(more + row, cache_modifier=".cg")
        for other in tl.static_range(1, SPLITS):
            sums += tl.load(mine + other * SIZE + place, cache_modifier=".cg")
            if NORM:
                squares += tl.load(more + other * ROWS + row, cache_modifier=".cg")
        tl.store(arrivals + tile, 0)
    return sums, squares, last
