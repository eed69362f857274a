"""linear_add on CUDA: y += x @ weight.T, a projection that adds itself to the residual stream, by cuBLAS.

Contract: linear_add(x[T, I], weight[O, I], updates y[T, O]); y overlaps no other operand. Precision and workspace as in
`linear`. Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from torch import Tensor

from mosaic.kernels.linear_add import reference
from mosaic.kernels.shared.operands import check_shapes

__all__ = ["launch", "reference"]


def launch(*, x: Tensor, weight: Tensor, y: Tensor, scratch: Tensor | None = None) -> None:
    """Add x @ weight.T to y [T, O] in place."""
    (rows, inner), outer, dtype = x.shape, weight.shape[0], x.dtype
    check_shapes(
        "linear_add",
        x=(x, (rows, inner), None),
        weight=(weight, (outer, inner), dtype),
        y=(y, (rows, outer), dtype),
    )
    y.addmm_(x, weight.t())
