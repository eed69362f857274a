"""keep_requests on CUDA: what the requests that a step serves keep of their keys, and where it lies.

One program a window, and one more for what lies beyond the last. Legend: B windows, E extents.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import tl, triton
from mosaic.kernels.cuda.shared.requests import BLOCK, START, C, packed_span

AT_ONCE: Final = 128  # untuned default


@triton.jit(do_not_specialize=["sequences", "held"])
def keep_requests_kernel(
    table, row, seen, cu_seqlens, extents, cu_extents, spans, packed_extents, cu_whole, own_extents, sequences, held,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    window = tl.program_id(0)
    lane = tl.arange(0, AT_ONCE)
    whole = window * 0  # tokens of those that refresh
    for at in range(0, sequences, AT_ONCE):
        inside = at + lane < sequences
        request = tl.load(row + at + lane, mask=inside, other=-1)
        there = (request >= 0) & (tl.load(seen + at + lane, mask=inside, other=1) == 0)
        whole = tl.maximum(whole, tl.max(tl.load(cu_seqlens + at + lane + 1, mask=there, other=0), 0))
    tl.store(cu_whole + window + 1, tl.minimum(tl.load(cu_seqlens + tl.minimum(window + 1, sequences)), whole))
    tl.store(cu_whole, window * 0, mask=window == 0)
    request = tl.load(row + window, mask=window < sequences, other=-1)
    known = request >= 0
    line = table + request * C
    start, block = tl.load(line + START, mask=known, other=0), tl.load(line + BLOCK, mask=known, other=0)
    low, high, kept = packed_span(line, known, start)
    packs = known & (tl.load(seen + window, mask=known, other=1) == 0)
    column = lane % 8
    span = tl.where(column == 0, start, tl.where(column == 1, start + block, tl.where(column == 2, low, high)))
    span = tl.where(column == 4, kept, span)
    tl.store(spans + 5 * window + column, tl.where(packs, span, 0).to(tl.int32), mask=(lane < 8) & (column < 5))
    first = tl.load(cu_extents + tl.minimum(window, sequences))
    extent = tl.load(extents + 4 * first + column, mask=packs & (lane < 8) & (column < 4), other=0)
    tl.store(packed_extents + 4 * window + column, extent, mask=(lane < 8) & (column < 4))
    last = tl.where(window == sequences, held, tl.load(cu_extents + tl.minimum(window + 1, sequences)))
    stores = known & (packs == 0)
    for at in range(4 * first, 4 * last, AT_ONCE):
        inside = at + lane < 4 * last
        value = tl.load(extents + at + lane, mask=inside & stores, other=0)
        value += tl.where(stores & (lane % 4 == 2), low - kept, 0)
        tl.store(own_extents + at + lane, value, mask=inside)


def launch(
    *, table: Tensor, row: Tensor, seen: Tensor, cu_seqlens: Tensor, extents: Tensor, cu_extents: Tensor, spans: Tensor,
    packed_extents: Tensor, cu_whole: Tensor, own_extents: Tensor, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write all outputs."""
    sequences = row.shape[0]
    keep_requests_kernel[(sequences + 1,)](
        table, row, seen, cu_seqlens, extents, cu_extents, spans, packed_extents, cu_whole, own_extents, sequences,
        extents.shape[0], AT_ONCE=AT_ONCE, num_warps=2,
    )  # fmt: skip
