"""rotary on CUDA: rotary position embedding, rotate-half, on the first R columns of each head, in place.

Formula: with a = position * inv_freq, (x1, x2) -> (x1 cos a - x2 sin a, x2 cos a + x1 sin a), x1 and x2 the two halves
of R, cosines and sines times `factor`.

Source: Su et al. 2021, "RoFormer". Legend: T rows, N heads, H head size, R rotated columns of a head, S sequences.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import power_of_two, tl, triton

# Untuned defaults: all 32 heads of 128 of an 8B model in one program, so a row's angles are computed once.
ELEMENTS: Final = 2048
WARPS: Final = 4


@triton.jit
def rotary_kernel(
    x,
    positions,
    inv_freq,
    sequences,
    factor,
    stride,
    OWN: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_R)
    if OWN:  # a row of frequencies for each sequence
        inv_freq += tl.load(sequences + row).to(tl.int64) * HALF
    angle = tl.load(positions + row).to(tl.float32) * tl.load(inv_freq + column, mask=column < HALF, other=0.0)
    cosine, sine = (tl.cos(angle) * factor)[None, :], (tl.sin(angle) * factor)[None, :]
    mask = (head < HEADS)[:, None] & (column < HALF)[None, :]
    place = x + row * stride + head[:, None] * SIZE + column[None, :]
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, (first * cosine - second * sine).to(x.dtype.element_ty), mask=mask)
    tl.store(place + HALF, (second * cosine + first * sine).to(x.dtype.element_ty), mask=mask)


def launch(
    *, x: Tensor, positions: Tensor, inv_freq: Tensor, head_size: int, sequences: Tensor | None = None,
    factor: float = 1.0, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Rotate the heads of x [T, N*H] in place by their rows' positions, and their sequences' frequencies."""
    rows, half = x.shape[0], inv_freq.shape[-1]
    heads = x.shape[-1] // head_size
    block_r = power_of_two(half, 1 << 16)
    block_n = power_of_two(heads, max(1, ELEMENTS // block_r))
    rotary_kernel[(rows, triton.cdiv(heads, block_n))](
        x,
        positions,
        inv_freq,
        positions if sequences is None else sequences,
        float(factor),
        x.stride(0),
        OWN=sequences is not None,
        HEADS=heads,
        SIZE=head_size,
        HALF=half,
        BLOCK_N=block_n,
        BLOCK_R=block_r,
        num_warps=WARPS,
    )
