"""confidence on CUDA: the softmax probability of the largest logit, exp(maximum - logsumexp).

Legend: M rows.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import tl, triton

ROWS: Final = 1024  # untuned default


@triton.jit(do_not_specialize=["count"])
def confidence_kernel(maximum, logsumexp, y, count, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = row < count
    difference = tl.load(maximum + row, mask=mask, other=0.0) - tl.load(logsumexp + row, mask=mask, other=0.0)
    tl.store(y + row, tl.exp(difference), mask=mask)


def launch(*, maximum: Tensor, logsumexp: Tensor, y: Tensor, scratch: Tensor | None = None) -> None:
    """Write exp(maximum - logsumexp) into y [M]."""
    count = maximum.numel()
    confidence_kernel[(triton.cdiv(count, ROWS),)](maximum, logsumexp, y, count, BLOCK=ROWS, num_warps=4)
