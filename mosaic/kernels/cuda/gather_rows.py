"""gather_rows on CUDA: chosen rows of x.

Contract: gather_rows(x[S, D] whole, rows[C] int64) -> y[C, D], y[c] = x[rows[c]]; y overlaps no operand; a row outside
x gives NaN. Legend: S tokens, C rows, D hidden.
"""

from __future__ import annotations

from torch import Tensor

from mosaic.kernels.cuda.shared.rows import copy_rows
from mosaic.kernels.gather_rows import reference
from mosaic.kernels.shared.operands import INDEX, check_shapes

__all__ = ["launch", "reference"]


def launch(*, x: Tensor, rows: Tensor, y: Tensor, scratch: Tensor | None = None) -> None:
    """Write x[rows] into y [C, D]."""
    (count,), (tokens, hidden) = rows.shape, x.shape
    check_shapes(
        "gather_rows", x=(x, (tokens, hidden), None), rows=(rows, (count,), INDEX[0]), y=(y, (count, hidden), x.dtype)
    )
    copy_rows(x, rows, y)
