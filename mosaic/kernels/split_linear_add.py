"""split_linear_add: y += x @ weight.T; here as one product, so arrivals stay as they are.

Contract: split_linear_add(x[T, I], weight[O, I], updates y[T, O], updates arrivals[A] int32); y overlaps no other operand;
arrivals are 0 before and after. Accumulates in float32 or wider. Legend: T rows, I inputs, O outputs, A counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.operands import check_shapes
from mosaic.kernels.shared.product import product
from mosaic.registrar.few_rows import tile_count

__all__ = ["bind", "check", "launch", "reference"]


def bind(*, x: Tensor, weight: Tensor, y: Tensor, arrivals: Tensor, scratch: Tensor | None = None) -> Run:
    """Add x @ weight.T to y [T, O] in place; 16-bit dtypes need scratch."""
    check(x, weight, y, arrivals)
    return product(x, weight, y, scratch, kernel="split_linear_add", accumulate=True)


launch = launcher(bind)


def check(x: Tensor, weight: Tensor, y: Tensor, arrivals: Tensor) -> None:
    """Check the operands."""
    (rows, inner), outer, dtype = x.shape, weight.shape[0], x.dtype
    check_shapes(
        "split_linear_add",
        x=(x, (rows, inner), None),
        weight=(weight, (outer, inner), dtype),
        y=(y, (rows, outer), dtype),
        arrivals=(arrivals, (max(arrivals.shape[0], tile_count(outer)),), torch.int32),
    )


def reference(*, x: Tensor, weight: Tensor, y: Tensor, arrivals: Tensor) -> dict[str, Tensor]:
    """Return y + x @ weight.T and the arrivals, by name, in plain PyTorch."""
    return {"y": y + x @ weight.T, "arrivals": arrivals}
