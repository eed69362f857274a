"""moe_gather on CUDA: the rows of the assignments, in expert order.

Legend: C rows, D hidden, k experts a row.
"""

from torch import Tensor

from mosaic.kernels.cuda.shared.rows import copy_rows


def launch(*, x: Tensor, order: Tensor, y: Tensor, top_k: int, scratch: Tensor | None = None) -> None:
    """Write the gathered rows into y [C*k, D]."""
    copy_rows(x, order, y, divisor=top_k)
