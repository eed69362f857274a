"""select_requests on CUDA: how the requests that a step serves attend to selected keys, and which of them select.

One program a window, and one more for what lies beyond the last. Legend: T tokens, B windows.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import tl, triton
from mosaic.kernels.cuda.shared.requests import BLOCK, NUMBER, PREFIX, START, C, mark_of
from mosaic.registrar.request_table import Column

AT_ONCE: Final = 128  # untuned default
PROMPT = tl.constexpr(int(Column.PROMPT))


@triton.jit(do_not_specialize=["sequences", "tokens"])
def select_requests_kernel(
    table, row, seen, cu_seqlens, positions, owner, captured, candidates, seen_exactly, seen_sparsely, cu_keys, votes, sequences,
    tokens, OWN: tl.constexpr, CARRIED: tl.constexpr, ANSWER: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    window = tl.program_id(0)
    lane = tl.arange(0, AT_ONCE)
    before = window * 0
    for at in range(0, window, AT_ONCE):
        before += tl.sum(tl.load(seen + at + lane, mask=at + lane < window, other=0), 0)
    tl.store(cu_keys + window, before)
    if window == sequences:  # what belongs to nobody
        for at in range(tl.load(cu_seqlens + sequences), tokens, AT_ONCE):
            tl.store(votes + at + lane, (lane * 0).to(tl.uint8), mask=at + lane < tokens)
        return
    request = tl.load(row + window)
    known = request >= 0
    line = table + request * C
    own = tl.load(line + OWN, mask=known, other=-1)
    has = own >= 0
    start, block = tl.load(line + START, mask=has, other=0), tl.load(line + BLOCK, mask=known, other=0)
    selects, carries = mark_of(line, has) & has, False
    if CARRIED:
        first = has & (tl.load(line + NUMBER, mask=known, other=1) == 0)
        carries = first & (start - block >= tl.load(line + PREFIX, mask=known, other=0))
    exactly = tl.where((selects & (carries == 0)) | (has == 0), tl.load(seen + window), 0)
    tl.store(owner + window, tl.maximum(own, 0))
    tl.store(captured + window, tl.where(carries, start - block, start).to(tl.int32))
    tl.store(candidates + window, tl.where(selects, start, 0).to(tl.int32))
    tl.store(seen_exactly + window, exactly)
    tl.store(seen_sparsely + window, tl.load(seen + window) - exactly)
    if ANSWER:
        start = tl.maximum(start, tl.load(line + PROMPT, mask=known, other=0))
    end = tl.load(cu_seqlens + window + 1)
    for at in range(tl.load(cu_seqlens + window), end, AT_ONCE):
        position = tl.load(positions + at + lane, mask=at + lane < end, other=0)
        tl.store(votes + at + lane, (has & (position >= start)).to(tl.uint8), mask=at + lane < end)


def launch(
    *, table: Tensor, row: Tensor, seen: Tensor, cu_seqlens: Tensor, positions: Tensor, owner: Tensor, captured: Tensor,
    candidates: Tensor, seen_exactly: Tensor, seen_sparsely: Tensor, cu_keys: Tensor, votes: Tensor, own: int, carried: bool =
    False, answer: bool = False, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write all outputs."""
    sequences = row.shape[0]
    select_requests_kernel[(sequences + 1,)](
        table, row, seen, cu_seqlens, positions, owner, captured, candidates, seen_exactly, seen_sparsely, cu_keys, votes,
        sequences, positions.shape[0], OWN=own, CARRIED=carried, ANSWER=answer, AT_ONCE=AT_ONCE,
    )  # fmt: skip
