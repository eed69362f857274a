"""write_canvas on CUDA: tokens into some rows of a canvas.

Taken rows are distinct; rows outside the canvas are skipped. canvas overlaps no other operand. Legend: R rows of the
state, C rows that are written.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import tl, triton

ROWS: Final = 128  # untuned default


@triton.jit(do_not_specialize=["count", "size"])
def write_canvas_kernel(token, rows, canvas, taken, count, size, ALL: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    row = tl.load(rows + place, mask=mask, other=-1)
    mask = mask & (row >= 0) & (row < size)
    if not ALL:
        mask = mask & (tl.load(taken + place, mask=mask, other=0) != 0)
    tl.store(canvas + row, tl.load(token + place, mask=mask, other=0), mask=mask)


def launch(
    *, token: Tensor, rows: Tensor, canvas: Tensor, taken: Tensor | None = None, scratch: Tensor | None = None
) -> None:
    """Update canvas."""
    count = rows.shape[0]
    write_canvas_kernel[(triton.cdiv(count, ROWS),)](
        token,
        rows,
        canvas,
        rows if taken is None else taken,
        count,
        canvas.shape[0],
        ALL=taken is None,
        BLOCK=ROWS,
        num_warps=4,
    )
