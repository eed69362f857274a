"""gather_rows: chosen rows of a matrix, or elements of a vector.

Contract: gather_rows(x[S, D] or x[S] whole, rows[C] int64) -> y[C, D] or y[C], y[c] = x[rows[c]]; y overlaps no operand.
Legend: S tokens, C rows.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.operands import INDEX, check_shapes

__all__ = ["bind", "check", "launch", "reference"]


def bind(*, x: Tensor, rows: Tensor, y: Tensor, scratch: Tensor | None = None) -> Run:
    """Write x[rows] into y; a row outside x raises IndexError."""
    check(x, rows, y)
    return partial(torch.index_select, x, 0, rows, out=y)


launch = launcher(bind)


def check(x: Tensor, rows: Tensor, y: Tensor) -> None:
    """Check shapes and dtypes."""
    (count,), columns = rows.shape, x.shape[1:2]
    check_shapes(
        "gather_rows",
        x=(x, (x.shape[0], *columns), None),
        rows=(rows, (count,), INDEX[0]),
        y=(y, (count, *columns), x.dtype),
    )


def reference(*, x: Tensor, rows: Tensor) -> Tensor:
    """Return x[rows] in plain PyTorch."""
    return x[rows]
