"""split_linear_add: y += x @ weight.T; here as one product, so arrivals stay as they are.

Accumulates in float32 or wider. Legend: T rows, I inputs, O outputs, A counts.
"""

from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.product import product


def bind(*, x: Tensor, weight: Tensor, y: Tensor, arrivals: Tensor, scratch: Tensor | None = None) -> Run:
    """Add x @ weight.T to y [T, O] in place; 16-bit dtypes need scratch."""
    return product(x, weight, y, scratch, kernel="split_linear_add", accumulate=True)


launch = launcher(bind)


def reference(*, x: Tensor, weight: Tensor, y: Tensor, arrivals: Tensor) -> dict[str, Tensor]:
    """Return y + x @ weight.T and the arrivals, by name, in plain PyTorch."""
    return {"y": y + x @ weight.T, "arrivals": arrivals}
