"""replace_rows on CUDA: y = x in chosen rows.

y and x do not overlap. Legend: M rows.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import tl, triton

ROWS: Final = 256  # untuned default


@triton.jit(do_not_specialize=["count"])
def replace_rows_kernel(y, x, chosen, count, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(chosen + row, mask=row < count, other=0) != 0
    tl.store(y + row, tl.load(x + row, mask=mine), mask=mine)


def launch(*, y: Tensor, x: Tensor, chosen: Tensor, scratch: Tensor | None = None) -> None:
    """Overwrite chosen rows of y [M]."""
    count = y.shape[0]
    replace_rows_kernel[(triton.cdiv(count, ROWS),)](y, x, chosen, count, BLOCK=ROWS, num_warps=4)
