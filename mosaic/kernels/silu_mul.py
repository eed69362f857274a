"""silu_mul: gate = silu(gate) * up, silu(z) = z / (1 + exp(-z)).

Rounds to the dtype after each of the two steps, as the reference models do. Legend: T rows, F feed-forward.
"""

from torch import Tensor
from torch.nn import functional

from mosaic.kernels.shared.binding import Run, launcher


def bind(*, gate: Tensor, up: Tensor, scratch: Tensor | None = None) -> Run:
    """Overwrite gate [T, F] with silu(gate) * up."""

    def run() -> None:
        functional.silu(gate, inplace=True)
        gate.mul_(up)

    return run


launch = launcher(bind)


def reference(*, gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up in plain PyTorch."""
    return gate * gate.sigmoid() * up
