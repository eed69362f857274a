"""reuse_requests on CUDA: what the requests that a step serves reuse of attention to their prefixes, and which of them refresh it.

Legend: B windows.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import tl, triton
from mosaic.kernels.cuda.shared.requests import NUMBER, START, C

AT_ONCE: Final = 64  # untuned default


@triton.jit(do_not_specialize=["sequences"])
def reuse_requests_kernel(
    table, row, kept_row, prefix, refreshed, sequences, OWN: tl.constexpr, STEPS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    window = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = window < sequences
    request = tl.load(row + window, mask=inside, other=-1)
    known = request >= 0
    line = table + request * C
    start, number = tl.load(line + START, mask=known, other=0), tl.load(line + NUMBER, mask=known, other=0)
    again = number == 0
    if STEPS:
        again = number % STEPS == 0
    tl.store(kept_row + window, tl.load(line + OWN, mask=known, other=0), mask=inside)
    tl.store(prefix + window, start.to(tl.int32), mask=inside)
    tl.store(refreshed + window, tl.where(again, start, 0).to(tl.int32), mask=inside)


def launch(
    *, table: Tensor, row: Tensor, kept_row: Tensor, prefix: Tensor, refreshed: Tensor, own: int, steps: int = 0,
    scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write all outputs."""
    sequences = row.shape[0]
    reuse_requests_kernel[(triton.cdiv(sequences, AT_ONCE),)](
        table, row, kept_row, prefix, refreshed, sequences, OWN=own, STEPS=steps, AT_ONCE=AT_ONCE, num_warps=2
    )
