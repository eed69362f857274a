"""read_canvas on CUDA: tokens of some rows of a canvas, and `open_id` for open positions.

Legend: R rows of the state, C rows that are read.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import tl, triton

ROWS: Final = 128  # untuned default


@triton.jit(do_not_specialize=["count", "size", "open_id"])
def read_canvas_kernel(canvas, rows, y, count, size, open_id, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    row = tl.load(rows + place, mask=mask, other=-1)
    token = tl.load(canvas + row, mask=mask & (row >= 0) & (row < size), other=-1)
    tl.store(y + place, tl.where(token == -1, open_id, token), mask=mask)


def launch(*, canvas: Tensor, rows: Tensor, y: Tensor, open_id: int, scratch: Tensor | None = None) -> None:
    """Write the tokens into y [C]."""
    count = rows.shape
    grid = (triton.cdiv(count[0], ROWS),)
    read_canvas_kernel[grid](canvas, rows, y, count[0], canvas.shape[0], open_id, BLOCK=ROWS, num_warps=4)
