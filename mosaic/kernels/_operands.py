"""One check for the operands of a launch: shapes by a legend, dtypes, unit stride of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from mosaic.errors import GraphError

__all__ = ["INDEX", "check_shape", "check_shapes"]

INDEX = (torch.int64,)


def check_shape(kernel: str, name: str, operand: Tensor, expected: tuple[int, ...], dtype: torch.dtype | None) -> None:
    """Raise `GraphError` unless `operand` has this shape, this dtype (None: any) and contiguous rows."""
    if tuple(operand.shape) != expected or (dtype is not None and operand.dtype != dtype):
        want = f"{list(expected)} {dtype if dtype is not None else ''}".strip()
        raise GraphError(f"{kernel}: operand '{name}' is {list(operand.shape)} {operand.dtype}, expected {want}.")
    if operand.dim() > 0 and operand.shape[-1] > 1 and operand.stride(-1) != 1:
        raise GraphError(f"{kernel}: operand '{name}' has stride {operand.stride(-1)} inside a row, expected 1.")


def check_shapes(kernel: str, **operands: tuple[Tensor | None, tuple[int, ...], torch.dtype | None]) -> None:
    """Check several operands, each given as (tensor, shape, dtype); a None tensor is an absent optional operand."""
    for name, (operand, expected, dtype) in operands.items():
        if operand is not None:
            check_shape(kernel, name, operand, expected, dtype)
