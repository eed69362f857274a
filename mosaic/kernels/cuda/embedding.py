"""embedding on CUDA: rows of a table.

Contract: embedding(ids[T] int64, table[V, D]) -> y[T, D], y[t] = table[ids[t]]; an id outside the table gives a row of
NaN. Legend: T tokens, V vocabulary, D hidden.
"""

from __future__ import annotations

from torch import Tensor

from mosaic.kernels.cuda.shared.rows import copy_rows
from mosaic.kernels.embedding import reference
from mosaic.kernels.shared.operands import INDEX, check_shapes

__all__ = ["launch", "reference"]


def launch(*, ids: Tensor, table: Tensor, y: Tensor, scratch: Tensor | None = None) -> None:
    """Write table[ids] into y [T, D]."""
    (tokens,), (vocabulary, hidden) = ids.shape, table.shape
    check_shapes(
        "embedding",
        ids=(ids, (tokens,), INDEX[0]),
        table=(table, (vocabulary, hidden), None),
        y=(y, (tokens, hidden), table.dtype),
    )
    copy_rows(table, ids, y)
