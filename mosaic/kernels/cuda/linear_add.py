"""linear_add on CUDA: y += x @ weight.T, a projection that adds itself to the residual stream, by cuBLAS.

Precision and workspace as in `linear`. Legend: T rows, I inputs, O outputs.
"""

from torch import Tensor


def launch(*, x: Tensor, weight: Tensor, y: Tensor, scratch: Tensor | None = None) -> None:
    """Add x @ weight.T to y [T, O] in place."""
    y.addmm_(x, weight.t())
