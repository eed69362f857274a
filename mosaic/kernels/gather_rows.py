"""gather_rows: chosen rows of a matrix, or elements of a vector.

Legend: S tokens, C rows.
"""

from functools import partial

import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher


def bind(*, x: Tensor, rows: Tensor, y: Tensor, scratch: Tensor | None = None) -> Run:
    """Write x[rows] into y; a row outside x raises IndexError."""
    return partial(torch.index_select, x, 0, rows, out=y)


launch = launcher(bind)


def reference(*, x: Tensor, rows: Tensor) -> Tensor:
    """Return x[rows] in plain PyTorch."""
    return x[rows]
