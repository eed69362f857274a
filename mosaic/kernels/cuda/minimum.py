"""minimum on CUDA: y = min(x, other), PyTorch's own kernel."""

from __future__ import annotations

from mosaic.kernels.minimum import launch

__all__ = ["launch"]
