"""shift_rows on CUDA: the row whose logits predict row i, in models trained with a shift (Dream): i - 1, within its
sequence.

Every program walks the B bounds, which are few. Legend: M rows, B sequences.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import tl, triton

ROWS: Final = 256  # untuned default


@triton.jit(do_not_specialize=["count", "bounds"])
def shift_rows_kernel(rows, cu_seqlens, y, count, bounds, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    row = tl.load(rows + place, mask=mask, other=0)
    first = tl.zeros([BLOCK], tl.int64)
    for index in range(bounds):
        bound = tl.load(cu_seqlens + index).to(tl.int64)
        first = tl.where(bound <= row, bound, first)
    tl.store(y + place, tl.maximum(row - 1, first), mask=mask)


def launch(*, rows: Tensor, cu_seqlens: Tensor, y: Tensor, scratch: Tensor | None = None) -> None:
    """Write the shifted rows into y [M]."""
    count, bounds = rows.shape[0], cu_seqlens.shape[0]
    shift_rows_kernel[(triton.cdiv(count, ROWS),)](rows, cu_seqlens, y, count, bounds, BLOCK=ROWS, num_warps=4)
