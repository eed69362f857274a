"""rms_norm: y = x / sqrt(mean(x^2) + eps) * weight, per row.

Source: Zhang and Sennrich 2019, "Root mean square layer normalization". Legend: T rows, D hidden.
"""

from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.norm import bind_norm, normalise_reference
from mosaic.kernels.shared.scratch import tiles_of


def bind(*, x: Tensor, weight: Tensor, y: Tensor, eps: float, scratch: Tensor | None = None) -> Run:
    """Write the normalised rows of x into y [T, D]; y may be x."""
    return bind_norm(x, weight, y, eps, tiles_of("rms_norm", scratch, {"x": x}))


launch = launcher(bind)


def reference(*, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the normalised rows in plain PyTorch."""
    return normalise_reference(x, weight, eps)
