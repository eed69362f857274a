"""RMS norm of the heads of a row, shared by rms_norm (one head) and head_norm; computed in float32 or wider."""

from functools import partial

import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run


def bind_norm(x_TD: Tensor, weight_H: Tensor, y_TD: Tensor, eps: float, tiles: list[Tensor]) -> Run:
    """Bind x / rms(x) * weight per head of H columns, written to y; y may be x; tiles as `norm_tiles` lists them."""
    epsilon, inverse_TN, *converted = tiles
    width = weight_H.shape[0]
    if not converted:
        return partial(_normalise, _heads(x_TD, width), weight_H, _heads(y_TD, width), inverse_TN, epsilon, eps)
    tile_RD, wide_H = converted
    rows = tile_RD.shape[0]

    def run() -> None:
        wide_H.copy_(weight_H)
        for start in range(0, x_TD.shape[0], rows):
            x_RD = x_TD[start : start + rows]
            tile = tile_RD[: x_RD.shape[0]]
            tile.copy_(x_RD)
            tile_RNH = _heads(tile, width)
            _normalise(tile_RNH, wide_H, tile_RNH, inverse_TN[: tile.shape[0]], epsilon, eps)
            y_TD[start : start + rows].copy_(tile)

    return run


def _heads(x_TD: Tensor, width: int) -> Tensor:
    return x_TD.view(x_TD.shape[0], x_TD.shape[1] // width, width)


def _normalise(
    x_TNH: Tensor, weight_H: Tensor, y_TNH: Tensor, inverse_TN1: Tensor, epsilon: Tensor, eps: float
) -> None:
    # A Python number in add becomes a tensor of 8 bytes from the allocator; this one lives in scratch instead.
    epsilon.fill_(eps)
    torch.linalg.vector_norm(x_TNH, dim=2, keepdim=True, out=inverse_TN1)
    torch.addcmul(epsilon, inverse_TN1, inverse_TN1, value=1.0 / weight_H.shape[0], out=inverse_TN1)
    torch.mul(x_TNH, inverse_TN1.rsqrt_(), out=y_TNH)
    y_TNH.mul_(weight_H)


def normalise_reference(x_TD: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Return the same in plain PyTorch."""
    x_TNH = _heads(x_TD, weight_H.shape[0])
    y_TNH = x_TNH * torch.rsqrt((x_TNH * x_TNH).mean(dim=2, keepdim=True) + eps) * weight_H
    return y_TNH.reshape(x_TD.shape)
