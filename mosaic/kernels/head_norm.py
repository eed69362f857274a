"""head_norm: rms_norm of every head of a row, in place (the q and k norms of Qwen3-style attention).

Legend: T rows, N heads, H head size.
"""

from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.norm import bind_norm, normalise_reference
from mosaic.kernels.shared.scratch import tiles_of


def bind(*, x: Tensor, weight: Tensor, eps: float, scratch: Tensor | None = None) -> Run:
    """Normalise every head of x [T, N*H] in place."""
    return bind_norm(x, weight, x, eps, tiles_of("head_norm", scratch, {"x": x, "weight": weight}))


launch = launcher(bind)


def reference(*, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the normalised heads in plain PyTorch."""
    return normalise_reference(x, weight, eps)
