"""moe_gather on CUDA: the rows of the assignments, in expert order.

Contract: moe_gather(x[C, D], order[C*k] int64; top_k) -> y[C*k, D], y[j] = x[order[j] // k]. Legend: C rows, D hidden,
k experts a row.
"""

from __future__ import annotations

from torch import Tensor

from mosaic.kernels.cuda.shared.rows import copy_rows
from mosaic.kernels.moe_gather import reference
from mosaic.kernels.shared.operands import INDEX, check_shapes

__all__ = ["launch", "reference"]


def launch(*, x: Tensor, order: Tensor, y: Tensor, top_k: int, scratch: Tensor | None = None) -> None:
    """Write the gathered rows into y [C*k, D]."""
    rows, hidden = x.shape
    check_shapes(
        "moe_gather",
        x=(x, (rows, hidden), None),
        order=(order, (rows * top_k,), INDEX[0]),
        y=(y, (rows * top_k, hidden), x.dtype),
    )
    copy_rows(x, order, y, divisor=top_k)
