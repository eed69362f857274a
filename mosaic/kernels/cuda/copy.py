"""copy on CUDA: y = x, on the device or between it and pinned host memory, by the copy engines where rows are adjacent.

Contract: copy(x[*T]) -> y[*T], of one dtype; y overlaps no operand. One of the two may be a tensor on the CPU: its memory
must be pinned (registered), or the copy stalls the host, and both must be contiguous, or PyTorch's allocator is asked.
"""

from __future__ import annotations

from torch import Tensor

from mosaic.errors import GraphError
from mosaic.kernels._operands import check_shape
from mosaic.kernels.copy import reference

__all__ = ["launch", "reference"]


def launch(*, x: Tensor, y: Tensor, scratch: Tensor | None = None) -> None:
    """Write x into y, ordered on the current stream."""
    check_shape("copy", "y", y, tuple(x.shape), x.dtype)
    if x.device != y.device and not (x.is_contiguous() and y.is_contiguous()):
        raise GraphError(
            f"copy: rows of {list(x.shape)} have strides {list(x.stride())} on {x.device} and {list(y.stride())} on "
            f"{y.device}; a transfer needs both contiguous."
        )
    y.copy_(x, non_blocking=True)
