"""rotary: rotary position embedding, rotate-half, on the first R columns of each head, in place.

Formula: with a = position * inv_freq, (x1, x2) -> (x1 cos a - x2 sin a, x2 cos a + x1 sin a), x1 and x2 the two halves
of R, cosines and sines times `factor`.

Source: Su et al. 2021, "RoFormer". Legend: T rows, N heads, H head size, R rotated columns of a head, h = R/2, S sequences.
"""

import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run, in_turn, launcher
from mosaic.kernels.shared.scratch import tiles_of


def bind(
    *, x: Tensor, positions: Tensor, inv_freq: Tensor, head_size: int, sequences: Tensor | None = None,
    factor: float = 1.0, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Rotate the heads of x [T, N*H] in place by their rows' positions, and their sequences' frequencies."""
    tokens, half = x.shape[0], inv_freq.shape[-1]
    heads = x.shape[-1] // head_size
    tiles = tiles_of("rotary", scratch, {"x": x, "inv_freq": inv_freq}, head_size=head_size)
    x_TNR = x.view(tokens, heads, head_size)[:, :, : 2 * half]
    step = tiles[0].shape[0]
    parts = []
    for start in range(0, tokens, step):
        rows = slice(start, start + step)
        numbers = None if sequences is None else sequences[rows]
        parts.append(_bind_tile(x_TNR[rows], positions[rows], inv_freq, numbers, factor, tiles))
    return in_turn(parts)


launch = launcher(bind)


def _bind_tile(
    x_CNR: Tensor, positions_C: Tensor, inv_freq: Tensor, sequences_C: Tensor | None, factor: float, tiles: list[Tensor]
) -> Run:
    position_C1, angle_Ch, cos_Ch, temporary_CNh, *more = (tile[: x_CNR.shape[0]] for tile in tiles)
    wide_CNR = x_CNR if x_CNR.dtype in (torch.float32, torch.float64) else more[-1]
    cos, sin = (more[0], more[1]) if x_CNR.dtype == torch.float64 else (cos_Ch, angle_Ch)
    cos_C1h, sin_C1h = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = wide_CNR.chunk(2, dim=2)
    given_C1 = positions_C.unsqueeze(1)

    def run() -> None:
        position_C1.copy_(given_C1)
        if sequences_C is None:
            torch.mul(position_C1, inv_freq, out=angle_Ch)
        else:
            torch.index_select(inv_freq, 0, sequences_C, out=angle_Ch).mul_(position_C1)
        torch.cos(angle_Ch, out=cos_Ch)
        torch.sin(angle_Ch, out=angle_Ch)
        if factor != 1.0:
            factor_C1 = position_C1.fill_(
                factor
            )  # the positions are used up; PyTorch would make a tensor of a Python number
            cos_Ch.mul_(factor_C1)
            angle_Ch.mul_(factor_C1)
        if cos is not cos_Ch:
            cos.copy_(cos_Ch)
            sin.copy_(angle_Ch)
        if wide_CNR is not x_CNR:
            wide_CNR.copy_(x_CNR)
        torch.mul(first, sin_C1h, out=temporary_CNh)
        first.mul_(cos_C1h).addcmul_(second, sin_C1h, value=-1)
        second.mul_(cos_C1h).add_(temporary_CNh)
        if wide_CNR is not x_CNR:
            x_CNR.copy_(wide_CNR)

    return run


def reference(
    *, x: Tensor, positions: Tensor, inv_freq: Tensor, head_size: int, sequences: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return the rotated rows in plain PyTorch, in the dtype of x (the angles too)."""
    x_TNH = x.reshape(x.shape[0], -1, head_size)
    half = inv_freq.shape[-1]
    own = inv_freq if sequences is None else inv_freq[sequences.long()]
    angle = (positions.to(x.dtype)[:, None] * own.to(x.dtype))[:, None, :]
    cos, sin = angle.cos() * factor, angle.sin() * factor
    first, second, rest = x_TNH[..., :half], x_TNH[..., half : 2 * half], x_TNH[..., 2 * half :]
    rotated = first * cos - second * sin, second * cos + first * sin
    return torch.cat([*rotated, rest], dim=2).reshape(x.shape)
