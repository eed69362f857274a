"""embedding: rows of a table.

Legend: T tokens, V vocabulary, D hidden.
"""

from functools import partial

import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher


def bind(*, ids: Tensor, table: Tensor, y: Tensor, scratch: Tensor | None = None) -> Run:
    """Write table[ids] into y [T, D]; an id outside the table raises IndexError."""
    return partial(torch.index_select, table, 0, ids, out=y)


launch = launcher(bind)


def reference(*, ids: Tensor, table: Tensor) -> Tensor:
    """Return table[ids] in plain PyTorch."""
    return table[ids]
