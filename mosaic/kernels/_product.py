"""x @ weight.T into a given view: BLAS in float32 and float64, converted tiles for 16-bit operands.

PyTorch's own bf16 and fp16 products on a CPU take packed copies of the operands from its allocator (measured: 2.1 MB
for [512, 1024] x [1024, 2048], PyTorch 2.13), so they are not used.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mosaic.kernels._binding import Run
from mosaic.kernels._scratch import carve, dtype_name
from mosaic.registrar.implementations.cpu import linear_tiles

__all__ = ["product"]


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
    if x_TI.dtype in (torch.float32, torch.float64):
        return _blas(x_TI, weight_OI, y_TO, bias_O, accumulate)
    tiles = carve(scratch, linear_tiles(x_TI.shape[1], dtype_name(x_TI.dtype)), kernel)
    return partial(_converted, x_TI, weight_OI, y_TO, tiles, bias_O, accumulate)


def _blas(x_TI: Tensor, weight_OI: Tensor, y_TO: Tensor, bias_O: Tensor | None, accumulate: bool) -> Run:
    if accumulate:
        return partial(y_TO.addmm_, x_TI, weight_OI.t())
    if bias_O is not None:
        return partial(torch.addmm, bias_O, x_TI, weight_OI.t(), out=y_TO)
    return partial(torch.mm, x_TI, weight_OI.t(), out=y_TO)


def _converted(
    x_TI: Tensor, weight_OI: Tensor, y_TO: Tensor, tiles: list[Tensor], bias_O: Tensor | None, accumulate: bool
) -> None:
    tokens, outer = y_TO.shape
    x_tile, weight_tile, y_tile = tiles
    rows, columns = y_tile.shape
    y_flat = y_tile.view(-1)
    for first in range(0, outer, columns):
        weight = weight_OI[first : first + columns]
        w = weight_tile[: weight.shape[0]]
        w.copy_(weight)
        for start in range(0, tokens, rows):
            x, y = x_TI[start : start + rows], y_TO[start : start + rows, first : first + columns]
            a, b = x_tile[: x.shape[0]], y_flat[: y.numel()].view(y.shape)
            a.copy_(x)
            if accumulate:
                b.copy_(y)
                b.addmm_(a, w.t())
            elif bias_O is not None:
                b.copy_(bias_O[first : first + columns].expand(y.shape))
                b.addmm_(a, w.t())
            else:
                torch.mm(a, w.t(), out=b)
            y.copy_(b)
