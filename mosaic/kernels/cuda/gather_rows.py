"""gather_rows on CUDA: chosen rows of a matrix, or elements of a vector.

Legend: S tokens, C rows, D hidden.
"""

from torch import Tensor

from mosaic.kernels.cuda.shared.rows import copy_rows


def launch(*, x: Tensor, rows: Tensor, y: Tensor, scratch: Tensor | None = None) -> None:
    """Write x[rows] into y."""
    copy_rows(x if x.dim() == 2 else x.unsqueeze(1), rows, y if y.dim() == 2 else y.unsqueeze(1))
