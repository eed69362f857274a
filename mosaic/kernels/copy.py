"""copy: y = x."""

from torch import Tensor


def launch(*, x: Tensor, y: Tensor, scratch: Tensor | None = None) -> None:
    """Write x into y."""
    y.copy_(x)


def reference(*, x: Tensor) -> Tensor:
    """Return a copy of x."""
    return x.clone()
