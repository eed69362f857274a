"""minimum on CUDA: y = min(x, other), PyTorch's own kernel. Contract: minimum(x[B] int32, other[B] int32) -> y[B] int32."""

from __future__ import annotations

from mosaic.kernels.minimum import launch

__all__ = ["launch"]
