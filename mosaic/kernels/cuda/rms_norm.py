"""rms_norm on CUDA: y = x / sqrt(mean(x^2) + eps) * weight, per row.

Source: Zhang and Sennrich 2019, "Root mean square layer normalization". One program a row, two passes over it: the second
reads from cache. Legend: T rows, D hidden.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import power_of_two, tl, triton

# Untuned defaults: a row of 4,096 in one tile, 16 elements a thread.
COLUMNS: Final = 4096
WARPS: Final = 8


@triton.jit
def rms_norm_kernel(x, weight, y, x_stride, y_stride, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + offset
        value = tl.load(x + row * x_stride + column, mask=column < columns, other=0.0).to(tl.float32)
        squares += value * value
    inverse = 1.0 / tl.sqrt(tl.sum(squares, 0) / columns + eps)
    # The sum joins all threads, so no x is overwritten before it is read for the sum.
    for start in range(0, columns, BLOCK):
        column = start + offset
        mask = column < columns
        value = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(y + row * y_stride + column, (value * inverse * scale).to(y.dtype.element_ty), mask=mask)


def launch(*, x: Tensor, weight: Tensor, y: Tensor, eps: float, scratch: Tensor | None = None) -> None:
    """Write the normalised rows of x into y [T, D]; y may be x."""
    rows, columns = x.shape
    block = power_of_two(columns, COLUMNS)
    rms_norm_kernel[(rows,)](x, weight, y, x.stride(0), y.stride(0), columns, eps, BLOCK=block, num_warps=WARPS)
