"""RMS norm of the heads of a row, shared by rms_norm (one head) and head_norm; computed in float32 or wider."""

from __future__ import annotations

import torch
from torch import Tensor

from mosaic.kernels._scratch import dtype_name
from mosaic.registrar.implementations.cpu import compute_dtype

__all__ = ["normalise", "normalise_reference"]


def normalise(x_TD: Tensor, weight_H: Tensor, y_TD: Tensor, eps: float, tiles: list[Tensor]) -> None:
    """Write x / rms(x) * weight per head of H columns into y; y may be x; tiles as in `TILES['rms_norm']`."""
    constants, inverse_TN, *converted = tiles
    width = weight_H.shape[0]
    constants[0].fill_(1.0 / width)
    constants[1].fill_(eps)
    if dtype_name(x_TD.dtype) == compute_dtype(dtype_name(x_TD.dtype)):
        _normalise_tile(_heads(x_TD, width), weight_H, _heads(y_TD, width), inverse_TN, constants)
        return
    tile_RD, wide_H = converted
    wide_H.copy_(weight_H)
    rows = tile_RD.shape[0]
    for start in range(0, x_TD.shape[0], rows):
        x_RD = x_TD[start : start + rows]
        tile = tile_RD[: x_RD.shape[0]]
        tile.copy_(x_RD)
        tile_RNH = _heads(tile, width)
        _normalise_tile(tile_RNH, wide_H, tile_RNH, inverse_TN[: tile.shape[0]], constants)
        y_TD[start : start + rows].copy_(tile)


def _heads(x_TD: Tensor, width: int) -> Tensor:
    return x_TD.view(x_TD.shape[0], x_TD.shape[1] // width, width)


def _normalise_tile(x_TNH: Tensor, weight_H: Tensor, y_TNH: Tensor, inverse_TN: Tensor, constants: Tensor) -> None:
    # A Python number in mul or add becomes a tensor of 8 bytes from the allocator; these two live in scratch instead.
    torch.linalg.vector_norm(x_TNH, dim=2, out=inverse_TN)
    torch.mul(inverse_TN, inverse_TN, out=inverse_TN)
    inverse_TN.mul_(constants[0]).add_(constants[1]).rsqrt_()
    torch.mul(x_TNH, inverse_TN.unsqueeze(2), out=y_TNH)
    y_TNH.mul_(weight_H)


def normalise_reference(x_TD: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Return the same in plain PyTorch."""
    x_TNH = _heads(x_TD, weight_H.shape[0])
    y_TNH = x_TNH * torch.rsqrt((x_TNH * x_TNH).mean(dim=2, keepdim=True) + eps) * weight_H
    return y_TNH.reshape(x_TD.shape)
