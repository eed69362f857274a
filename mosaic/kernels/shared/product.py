"""x @ weight.T into a given view: BLAS in float32 and float64, converted tiles for 16-bit operands.

PyTorch's own bf16 and fp16 products on a CPU take oneDNN's scratchpad from PyTorch's allocator, whatever the form of the
call, of a size that depends on the processor (PyTorch 2.13, bf16 [512, 1024] x [1024, 2048]: 2.1 MB on one with matrix
units, 0.13 MB on one without); without oneDNN they ask for nothing and take six times as long as in float32. So they are
not used.
"""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run
from mosaic.kernels.shared.scratch import beginning, carve, dtype_name
from mosaic.registrar.tiles import PRODUCT_TILE, linear_tiles

# The views of this many parts are made once: a fifth of the time of a small product. Those of many would take memory.
_MOST_KEPT: Final = 16


def product(
    x_TI: Tensor,
    weight_OI: Tensor,
    y_TO: Tensor,
    scratch: Tensor | None,
    *,
    kernel: str,
    bias_O: Tensor | None = None,
    accumulate: bool = False,
) -> Run:
    """Bind y = x @ weight.T (+ bias), or y += x @ weight.T, in float32 or wider; it writes only y and scratch."""
    assert bias_O is None or not accumulate
    if x_TI.dtype in (torch.float32, torch.float64):
        return _blas(x_TI, weight_OI, y_TO, bias_O, accumulate)
    tiles = carve(scratch, linear_tiles(dtype_name(x_TI.dtype)), kernel)
    before_TO = y_TO if accumulate else None if bias_O is None else bias_O.expand(y_TO.shape)
    parts = partial(_parts, x_TI, weight_OI, y_TO, before_TO, tiles)
    sizes = (*y_TO.shape, x_TI.shape[1])
    if math.prod(-(-size // tile) for size, tile in zip(sizes, PRODUCT_TILE, strict=True)) > _MOST_KEPT:
        return lambda: _multiply(parts())
    return partial(_multiply, list(parts()))


def _blas(x_TI: Tensor, weight_OI: Tensor, y_TO: Tensor, bias_O: Tensor | None, accumulate: bool) -> Run:
    if accumulate:
        return partial(y_TO.addmm_, x_TI, weight_OI.t())
    if bias_O is not None:
        return partial(torch.addmm, bias_O, x_TI, weight_OI.t(), out=y_TO)
    return partial(torch.mm, x_TI, weight_OI.t(), out=y_TO)


class _Part(NamedTuple):
    """A part of x and one of the weight, the tiles that they are converted to, and the total that they add to."""

    x: Tensor
    x_tile: Tensor
    weight: Tensor
    weight_tile: Tensor
    total: Tensor
    before: Tensor | None  # what the total starts from
    accumulates: bool  # on what the total holds; else that is replaced
    y: Tensor | None  # where the total goes after its last part


def _parts(
    x_TI: Tensor, weight_OI: Tensor, y_TO: Tensor, before_TO: Tensor | None, tiles: list[Tensor]
) -> Iterator[_Part]:
    rows, columns, depth = PRODUCT_TILE
    x_tile, weight_tile, total_tile = tiles
    starts = range(0, x_TI.shape[1], depth)
    for column in range(0, y_TO.shape[1], columns):
        for row in range(0, y_TO.shape[0], rows):
            place = slice(row, row + rows), slice(column, column + columns)
            y, before = y_TO[place], None if before_TO is None else before_TO[place]
            total = beginning(total_tile, y.shape)
            for start in starts:
                x, weight = x_TI[place[0], start : start + depth], weight_OI[place[1], start : start + depth]
                yield _Part(
                    x=x,
                    x_tile=beginning(x_tile, x.shape),
                    weight=weight.t(),
                    weight_tile=beginning(weight_tile, weight.shape).t(),
                    total=total,
                    before=before if start == starts[0] else None,
                    accumulates=before is not None or start > starts[0],
                    y=y if start == starts[-1] else None,
                )


def _multiply(parts: Iterable[_Part]) -> None:
    for part in parts:
        if part.before is not None:
            part.total.copy_(part.before)
        part.x_tile.copy_(part.x)
        part.weight_tile.copy_(part.weight)
        part.total.addmm_(part.x_tile, part.weight_tile, beta=int(part.accumulates))
        if part.y is not None:
            part.y.copy_(part.total)
