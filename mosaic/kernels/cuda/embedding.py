"""embedding on CUDA: rows of a table.

Legend: T tokens, V vocabulary, D hidden.
"""

from torch import Tensor

from mosaic.kernels.cuda.shared.rows import copy_rows


def launch(*, ids: Tensor, table: Tensor, y: Tensor, scratch: Tensor | None = None) -> None:
    """Write table[ids] into y [T, D]."""
    copy_rows(table, ids, y)
