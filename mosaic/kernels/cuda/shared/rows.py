"""Copies chosen rows, shared by embedding, gather_rows and moe_gather: y[c] = x[rows[c] // divisor].

A row outside x reads as NaN: a kernel cannot raise, and NaN does not go unnoticed. Of integers it reads as 0.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import power_of_two, tl, triton

# Untuned defaults: 16 elements a thread.
COLUMNS: Final = 2048
WARPS: Final = 4


@triton.jit(do_not_specialize=["count"])
def copy_rows_kernel(
    x, rows, y, x_stride, y_stride, count, columns, DIVISOR: tl.constexpr, BLOCK: tl.constexpr, FLOATING: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(rows + row).to(tl.int64)
    known = (source >= 0) & (source // DIVISOR < count)
    mask = column < columns
    outside = float("nan") if FLOATING else 0
    value = tl.load(x + source // DIVISOR * x_stride + column, mask=mask & known, other=outside)
    tl.store(y + row * y_stride + column, value, mask=mask)


def copy_rows(x_SD: Tensor, rows_C: Tensor, y_CD: Tensor, *, divisor: int = 1) -> None:
    """Write x[rows // divisor] into y [C, D]; shapes are checked by the caller."""
    (count, columns), chosen = x_SD.shape, rows_C.shape[0]
    block = power_of_two(columns, COLUMNS)
    copy_rows_kernel[(chosen, triton.cdiv(columns, block))](
        x_SD,
        rows_C,
        y_CD,
        x_SD.stride(0),
        y_CD.stride(0),
        count,
        columns,
        DIVISOR=divisor,
        BLOCK=block,
        FLOATING=x_SD.is_floating_point(),
        num_warps=WARPS,
    )
