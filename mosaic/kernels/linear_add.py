"""linear_add: y += x @ weight.T, a projection that adds itself to the residual stream.

Accumulates in float32 or wider. Legend: T rows, I inputs, O outputs.
"""

from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.product import product


def bind(*, x: Tensor, weight: Tensor, y: Tensor, scratch: Tensor | None = None) -> Run:
    """Add x @ weight.T to y [T, O] in place; 16-bit dtypes need scratch."""
    return product(x, weight, y, scratch, kernel="linear_add", accumulate=True)


launch = launcher(bind)


def reference(*, x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    """Return y + x @ weight.T in plain PyTorch."""
    return y + x @ weight.T
