"""gather_rows: chosen rows of x.

Contract: gather_rows(x[S, D] whole, rows[C] int64) -> y[C, D], y[c] = x[rows[c]]; y overlaps no operand. Legend: S
tokens, C rows.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.operands import INDEX, check_shapes

__all__ = ["bind", "launch", "reference"]


def bind(*, x: Tensor, rows: Tensor, y: Tensor, scratch: Tensor | None = None) -> Run:
    """Write x[rows] into y [C, D]; a row outside x raises IndexError."""
    (count,), (tokens, hidden) = rows.shape, x.shape
    check_shapes(
        "gather_rows", x=(x, (tokens, hidden), None), rows=(rows, (count,), INDEX[0]), y=(y, (count, hidden), x.dtype)
    )
    return partial(torch.index_select, x, 0, rows, out=y)


launch = launcher(bind)


def reference(*, x: Tensor, rows: Tensor) -> Tensor:
    """Return x[rows] in plain PyTorch."""
    return x[rows]
