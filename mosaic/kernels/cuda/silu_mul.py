"""silu_mul on CUDA: gate = silu(gate) * up, silu(z) = z / (1 + exp(-z)).

Float32 inside; rounds to the dtype after each of the two steps, as the reference models do. Legend: T rows, F feed-forward.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import power_of_two, tl, triton

# Untuned defaults: 16 elements a thread.
COLUMNS: Final = 2048
WARPS: Final = 4


@triton.jit
def silu_mul_kernel(gate, up, gate_stride, up_stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    place = gate + row * gate_stride + column
    z = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    silu = (z / (1.0 + tl.exp(-z))).to(gate.dtype.element_ty).to(tl.float32)
    other = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, (silu * other).to(gate.dtype.element_ty), mask=mask)


def launch(*, gate: Tensor, up: Tensor, scratch: Tensor | None = None) -> None:
    """Overwrite gate [T, F] with silu(gate) * up."""
    rows, columns = gate.shape
    block = power_of_two(columns, COLUMNS)
    silu_mul_kernel[(rows, triton.cdiv(columns, block))](
        gate, up, gate.stride(0), up.stride(0), columns, BLOCK=block, num_warps=WARPS
    )
