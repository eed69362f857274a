"""write_canvas on CUDA: tokens into some rows of a canvas.

Taken rows are distinct; rows outside the canvas are skipped. canvas overlaps no other operand. Legend: R rows of the
state, C rows that are written.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import tl, triton

ROWS: Final = 128  # untuned default


@triton.jit(do_not_specialize=["count", "size"])
def write_canvas_kernel(token, rows, canvas, taken, count, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    row = tl.load(rows + place, mask=mask, other=-1)
    mask = mask & (row >= 0) & (row < size) & (tl.load(taken + place, mask=mask, other=0) != 0)
    tl.store(canvas + row, tl.load(token + place, mask=mask, other=0), mask=mask)


def launch(*, token: Tensor, rows: Tensor, canvas: Tensor, taken: Tensor, scratch: Tensor | None = None) -> None:
    """Update canvas."""
    count = rows.shape[0]
    grid = (triton.cdiv(count, ROWS),)
    write_canvas_kernel[grid](token, rows, canvas, taken, count, canvas.shape[0], BLOCK=ROWS, num_warps=4)
