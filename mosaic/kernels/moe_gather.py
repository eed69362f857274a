"""moe_gather: the rows of the assignments, in expert order.

Legend: C rows, D hidden, k experts a row.
"""

import torch
from torch import Tensor

from mosaic.kernels.shared.scratch import tiles_of


def launch(*, x: Tensor, order: Tensor, y: Tensor, top_k: int, scratch: Tensor | None = None) -> None:
    """Write the gathered rows into y [C*k, D]."""
    divisor, row = tiles_of("moe_gather", scratch, {"order": order})
    torch.floor_divide(order, divisor.fill_(top_k), out=row)
    torch.index_select(x, 0, row, out=y)


def reference(*, x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Return the gathered rows in plain PyTorch."""
    return x[order // top_k]
