"""linear: y = x @ weight.T + bias.

Accumulates in float32 or wider. Legend: T rows, I inputs, O outputs.
"""

from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.product import product


def bind(*, x: Tensor, weight: Tensor, y: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None) -> Run:
    """Write x @ weight.T + bias into y [T, O]; 16-bit dtypes need scratch."""
    return product(x, weight, y, scratch, kernel="linear", bias_O=bias)


launch = launcher(bind)


def reference(*, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias in plain PyTorch."""
    y = x @ weight.T
    return y if bias is None else y + bias
