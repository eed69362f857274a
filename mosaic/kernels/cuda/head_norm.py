"""head_norm on CUDA: rms_norm of every head of a row, in place (the q and k norms of Qwen3-style attention).

One program a row and group of heads, a tile [heads, H] at once. Legend: T rows, N heads, H head size.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import power_of_two, tl, triton

# Untuned defaults: 16 elements a thread.
ELEMENTS: Final = 2048
WARPS: Final = 4


@triton.jit
def head_norm_kernel(
    x, weight, stride, eps, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_H)
    mask = (head < HEADS)[:, None] & (column < SIZE)[None, :]
    place = x + row * stride + head[:, None] * SIZE + column[None, :]
    value = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 1) / SIZE + eps)
    tl.store(place, (value * inverse[:, None] * scale[None, :]).to(x.dtype.element_ty), mask=mask)


def launch(*, x: Tensor, weight: Tensor, eps: float, scratch: Tensor | None = None) -> None:
    """Normalise every head of x [T, N*H] in place."""
    rows, size = x.shape[0], weight.shape[0]
    heads = x.shape[-1] // size
    block_h = power_of_two(size, 1 << 16)
    block_n = power_of_two(heads, max(1, ELEMENTS // block_h))
    head_norm_kernel[(rows, triton.cdiv(heads, block_n))](
        x, weight, x.stride(0), eps, HEADS=heads, SIZE=size, BLOCK_N=block_n, BLOCK_H=block_h, num_warps=WARPS
    )
