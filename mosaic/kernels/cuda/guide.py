"""guide on CUDA: classifier-free guidance of hidden rows.

x and uncond do not overlap. Legend: C rows, D hidden.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import power_of_two, tl, triton

# Untuned defaults: 16 elements a thread.
COLUMNS: Final = 2048
WARPS: Final = 4


@triton.jit
def guide_kernel(x, uncond, guidance, x_stride, uncond_stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    place = x + row * x_stride + column
    given = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(uncond + row * uncond_stride + column, mask=mask, other=0.0).to(tl.float32)
    guided = other + (tl.load(guidance + row) + 1.0) * (given - other)
    tl.store(place, guided.to(x.dtype.element_ty), mask=mask)


def launch(*, x: Tensor, uncond: Tensor, guidance: Tensor, scratch: Tensor | None = None) -> None:
    """Overwrite x [C, D] with the guided rows."""
    rows, columns = x.shape
    block = power_of_two(columns, COLUMNS)
    guide_kernel[(rows, triton.cdiv(columns, block))](
        x, uncond, guidance, x.stride(0), uncond.stride(0), columns, BLOCK=block, num_warps=WARPS
    )
