"""zeros on CUDA: y = 0, a fill of the driver's."""

from __future__ import annotations

from mosaic.kernels.zeros import launch

__all__ = ["launch"]
