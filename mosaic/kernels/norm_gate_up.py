"""norm_gate_up: y = silu(h @ gate.T) * (h @ up.T) with h = rms_norm(x), for few rows.

Norm, products and activation as in `rms_norm`, `linear` and `silu_mul`. Legend: T rows, D hidden, F feed-forward.
"""

from torch import Tensor

from mosaic.kernels import silu_mul
from mosaic.kernels.norm_qkv import bind_rows
from mosaic.kernels.shared.binding import Run, in_turn, launcher
from mosaic.kernels.shared.norm import normalise_reference
from mosaic.kernels.shared.product import product
from mosaic.kernels.shared.scratch import tiles_of


def bind(
    *, x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, y: Tensor, eps: float, scratch: Tensor | None = None
) -> Run:
    """Write silu(h @ gate.T) * (h @ up.T) into y [T, F]."""
    other, h, norms, products = tiles_of("norm_gate_up", scratch, {"x": x, "gate": gate})
    return in_turn([
        bind_rows(x, norm, h, eps, norms),
        product(h, gate, y, products, kernel="norm_gate_up"),
        product(h, up, other, products, kernel="norm_gate_up"),
        silu_mul.bind(gate=y, up=other),
    ])  # fmt: skip


launch = launcher(bind)


def reference(*, x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, eps: float) -> Tensor:
    """Return silu(h @ gate.T) * (h @ up.T) in plain PyTorch."""
    h = normalise_reference(x, norm, eps)
    return silu_mul.reference(gate=h @ gate.T, up=h @ up.T)
