"""note_focus on CUDA: what a step has kept and decided of requests of a table.

One program a window. Legend: B windows, M rows to decide.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.focus_requests import DECIDED, KEPT, steps_before
from mosaic.kernels.cuda.shared.launching import tl, triton
from mosaic.kernels.cuda.shared.requests import START, C

AT_ONCE: Final = 64  # untuned default


@triton.jit(do_not_specialize=["own"])
def note_focus_kernel(
    table, state, row, cu_seqlens, cu_rows, seen, committed, state_stride, own, PROCESSED: tl.constexpr, PREFILLS:
    tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    window = tl.program_id(0)
    request, lane = tl.load(row + window), tl.arange(0, AT_ONCE)
    if (request < 0) | (tl.load(cu_seqlens + window) == tl.load(cu_seqlens + window + 1)):
        return
    line = table + request * C
    mine = tl.load(line + own)
    if mine < 0:
        return
    held, steps = state + mine * state_stride, steps_before(line, PREFILLS)
    taken = lane * 0
    end = tl.load(cu_rows + window + 1)
    for at in range(tl.load(cu_rows + window), end, AT_ONCE):
        taken += tl.load(committed + at + lane, mask=at + lane < end, other=0).to(tl.int32)
    before = tl.where(steps > 0, tl.load(held + KEPT, mask=steps > 0, other=0.0), PROCESSED)
    kept = (tl.load(seen + window) - tl.load(line + START)).to(tl.float32)
    tl.store(held + KEPT, tl.maximum(before, kept), mask=steps >= 0)
    tl.store(held + DECIDED, tl.sum(taken, 0).to(tl.float32), mask=steps >= 0)


def launch(
    *, table: Tensor, state: Tensor, row: Tensor, cu_seqlens: Tensor, cu_rows: Tensor, seen: Tensor, committed: Tensor,
    own: int, processed: int, first_step: str, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Update the state."""
    note_focus_kernel[(row.shape[0],)](
        table, state, row, cu_seqlens, cu_rows, seen, committed, state.stride(0), own, PROCESSED=processed,
        PREFILLS=first_step == "prefill", AT_ONCE=AT_ONCE,
    )  # fmt: skip
