"""rotary: rotary position embedding, rotate-half, on the first R columns of each head, in place.

Formula: with a = position * inv_freq, (x1, x2) -> (x1 cos a - x2 sin a, x2 cos a + x1 sin a), x1 and x2 the two halves
of R. Contract: rotary(updates x[T, N*H], positions[T] int32, inv_freq[R/2] float32; head_size); angles, cosines
and sines in float32. Source: Su et al. 2021, "RoFormer". Legend: T rows, N heads, H head size, R rotated columns of a
head, h = R/2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mosaic.kernels._operands import check_shapes, heads_of
from mosaic.kernels._scratch import tiles_of

__all__ = ["launch", "reference"]


def launch(*, x: Tensor, positions: Tensor, inv_freq: Tensor, head_size: int, scratch: Tensor | None = None) -> None:
    """Rotate the heads of x [T, N*H] in place by their rows' positions."""
    tokens, half = x.shape[0], inv_freq.shape[0]
    heads = heads_of("rotary", "x", x, head_size)
    check_shapes(
        "rotary",
        x=(x, (tokens, heads * head_size), None),
        positions=(positions, (tokens,), torch.int32),
        inv_freq=(inv_freq, (half,), torch.float32),
    )
    tiles = tiles_of("rotary", scratch, {"x": x, "inv_freq": inv_freq}, head_size=head_size)
    step = tiles[0].shape[0]
    for start in range(0, tokens, step):
        rows = x[start : start + step].view(-1, heads, head_size)[:, :, : 2 * half]
        _rotate_tile(rows, positions[start : start + step], inv_freq, tiles)


def _rotate_tile(x_CNR: Tensor, positions_C: Tensor, inv_freq_h: Tensor, tiles: list[Tensor]) -> None:
    rows = x_CNR.shape[0]
    position_C, angle_Ch, cos_Ch, temporary_CNh, *more = (tile[:rows] for tile in tiles)
    position_C.copy_(positions_C)
    torch.mul(position_C.unsqueeze(1), inv_freq_h, out=angle_Ch)
    torch.cos(angle_Ch, out=cos_Ch)
    torch.sin(angle_Ch, out=angle_Ch)
    if x_CNR.dtype == torch.float64:
        cos, sin = more[0].copy_(cos_Ch), more[1].copy_(angle_Ch)
        _rotate(x_CNR, cos, sin, temporary_CNh)
    elif x_CNR.dtype == torch.float32:
        _rotate(x_CNR, cos_Ch, angle_Ch, temporary_CNh)
    else:
        wide_CNR = more[0].copy_(x_CNR)
        _rotate(wide_CNR, cos_Ch, angle_Ch, temporary_CNh)
        x_CNR.copy_(wide_CNR)


def _rotate(x_CNR: Tensor, cos_Ch: Tensor, sin_Ch: Tensor, temporary_CNh: Tensor) -> None:
    half = cos_Ch.shape[1]
    first, second = x_CNR[:, :, :half], x_CNR[:, :, half:]
    cos, sin = cos_Ch.unsqueeze(1), sin_Ch.unsqueeze(1)
    torch.mul(first, sin, out=temporary_CNh)
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(temporary_CNh)


def reference(*, x: Tensor, positions: Tensor, inv_freq: Tensor, head_size: int) -> Tensor:
    """Return the rotated rows in plain PyTorch, in the dtype of x (the angles too)."""
    x_TNH = x.reshape(x.shape[0], -1, head_size)
    half = inv_freq.shape[0]
    angle = (positions.to(x.dtype)[:, None] * inv_freq.to(x.dtype))[:, None, :]
    first, second, rest = x_TNH[..., :half], x_TNH[..., half : 2 * half], x_TNH[..., 2 * half :]
    rotated = first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()
    return torch.cat([*rotated, rest], dim=2).reshape(x.shape)
