"""copy on CUDA: y = x, on the device or between it and pinned host memory, by the copy engines where rows are adjacent.

One of the two may be a tensor on the CPU: its memory must be pinned (registered), or the copy stalls the host. Between the
two, rows of a matrix may lie apart (columns of a wider one): that is one two-dimensional transfer, for PyTorch would ask its
allocator for a contiguous detour.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from mosaic.errors import GraphError, MissingExtra, RuntimeMemoryError


@cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise MissingExtra("cuda-python", "cuda", "transfers of rows that lie apart") from error
    return driver


def launch(*, x: Tensor, y: Tensor, scratch: Tensor | None = None) -> None:
    """Write x into y, ordered on the current stream."""
    if x.device == y.device or (x.is_contiguous() and y.is_contiguous()):
        y.copy_(x, non_blocking=True)
    elif x.dim() == 2 and x.stride(1) == y.stride(1) == 1:
        _transfer_rows(x, y)
    else:
        raise GraphError(
            f"copy: rows of {list(x.shape)} have strides {list(x.stride())} on {x.device} and {list(y.stride())} on "
            f"{y.device}; a transfer needs both contiguous, or a matrix of rows."
        )


def _transfer_rows(x: Tensor, y: Tensor) -> None:
    driver, spec = _driver(), _driver().CUDA_MEMCPY2D()
    for side, tensor in (("src", x), ("dst", y)):
        on_host = tensor.device.type == "cpu"
        kind = driver.CUmemorytype
        setattr(spec, f"{side}MemoryType", kind.CU_MEMORYTYPE_HOST if on_host else kind.CU_MEMORYTYPE_DEVICE)
        setattr(spec, f"{side}{'Host' if on_host else 'Device'}", tensor.data_ptr())
        setattr(spec, f"{side}Pitch", tensor.stride(0) * tensor.element_size())
    spec.WidthInBytes, spec.Height = x.shape[1] * x.element_size(), x.shape[0]
    device = y.device if y.device.type == "cuda" else x.device
    (error,) = driver.cuMemcpy2DAsync(spec, torch.cuda.current_stream(device).cuda_stream)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeMemoryError(
            f"copy: the driver refused a transfer of {spec.Height} rows of {spec.WidthInBytes} bytes from {x.device} to "
            f"{y.device}: {error.name}. Is the host memory pinned?"
        )
