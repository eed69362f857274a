"""focus_requests on CUDA: what evict_tokens goes by of requests of a table.

One program a window, and one more for tokens behind the last. Legend: B windows, T tokens.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels import focus_requests as on_cpu
from mosaic.kernels.cuda.shared.launching import power_of_two, tl, triton
from mosaic.kernels.cuda.shared.requests import NUMBER, START, C
from mosaic.registrar.operators.read_canvas import OPEN
from mosaic.registrar.request_table import Column

AT_ONCE: Final = 64  # untuned default
CANVAS, STEP, PROMPT = (tl.constexpr(int(one)) for one in (Column.CANVAS, Column.STEP, Column.PROMPT))
KEPT, DECIDED, COUNTED = (tl.constexpr(one) for one in (on_cpu.KEPT, on_cpu.DECIDED, on_cpu.COUNTED))
NOTHING = tl.constexpr(OPEN)


@triton.jit
def steps_before(line, PREFILLS: tl.constexpr):
    """The steps of a request's block that have counted; -1: the next one does not count."""
    steps = tl.load(line + NUMBER)
    if PREFILLS:
        steps -= (tl.load(line + START) < tl.load(line + PROMPT)).to(tl.int64)
    return steps


@triton.jit(do_not_specialize=["sequences", "tokens", "own"])
def focus_requests_kernel(
    table, canvas, state, row, cu_seqlens, positions, first, listed, votes, status, progress, decoded, owner, state_stride,
    sequences, tokens, own, PROCESSED: tl.constexpr, MASKED: tl.constexpr, WHOLE: tl.constexpr, PREFILLS: tl.constexpr,
    OF_BLOCK: tl.constexpr, COUNTS_BLOCK: tl.constexpr, POSITIONS: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    window = tl.program_id(0)
    lane, offset = tl.arange(0, AT_ONCE), tl.arange(0, BLOCK)
    none = (lane * 0).to(tl.uint8)
    if window == sequences:  # what belongs to nobody
        for at in range(tl.load(cu_seqlens + sequences), tokens, AT_ONCE):
            tl.store(votes + at + lane, none, mask=at + lane < tokens)
            tl.store(status + at + lane, none, mask=at + lane < tokens)
        return
    request = tl.load(row + window)
    names = listed + window * POSITIONS
    line = table + request * C
    mine = tl.load(line + own, mask=request >= 0, other=-1)
    begin = tl.load(line + START, mask=request >= 0, other=0)
    if mine < 0:
        tl.store(names + offset, offset * 0 - 1, mask=offset < POSITIONS)
        tl.store(first + window, begin.to(tl.int32))
        tl.store(progress + window, 0)
        tl.store(decoded + window, COUNTED)
        tl.store(owner + window, request * 0)
        if request >= 0:
            end = tl.load(cu_seqlens + window + 1)
            for at in range(tl.load(cu_seqlens + window), end, AT_ONCE):
                tl.store(votes + at + lane, none, mask=at + lane < end)
                tl.store(status + at + lane, none, mask=at + lane < end)
        return
    held = state + mine * state_stride
    steps = steps_before(line, PREFILLS)
    kept = tl.where(steps > 0, tl.load(held + KEPT, mask=steps > 0, other=0.0), PROCESSED).to(tl.int32)
    starts = steps <= 0
    if not COUNTS_BLOCK:
        starts = starts & (tl.load(line + STEP) == tl.load(line + NUMBER))
    count = tl.where(starts, -1.0, tl.load(held + DECIDED, mask=steps * 0 + starts.to(tl.int64) == 0, other=0.0))
    tl.store(held + DECIDED, (kept * 0 + COUNTED).to(tl.float32))
    tl.store(first + window, begin.to(tl.int32))
    tl.store(progress + window, kept if OF_BLOCK else kept * 0)
    tl.store(decoded + window, count.to(tl.int32))
    tl.store(owner + window, mine)
    of_canvas = canvas + tl.load(line + CANVAS) + begin
    if MASKED:
        open_ = (tl.load(of_canvas + offset, mask=offset < POSITIONS, other=NOTHING + 1) == NOTHING).to(tl.int32)
        tl.store(names + tl.cumsum(open_, 0) - open_, offset, mask=open_ > 0)
        tl.store(names + offset, offset * 0 - 1, mask=(offset >= tl.sum(open_, 0)) & (offset < POSITIONS))
    else:
        tl.store(names + offset, offset, mask=offset < POSITIONS)
    end = tl.load(cu_seqlens + window + 1)
    for at in range(tl.load(cu_seqlens + window), end, AT_ONCE):
        there = at + lane < end
        place = tl.load(positions + at + lane, mask=there, other=0) - begin
        inside = there & (place >= 0) & (place < POSITIONS)
        masked = inside & (tl.load(of_canvas + place, mask=inside, other=NOTHING + 1) == NOTHING)
        says = masked if MASKED else inside
        tl.store(votes + at + lane, says.to(tl.uint8), mask=there)
        evicts = masked & (steps >= (1 if WHOLE else 0))
        kind = tl.where(evicts, tl.where(place < kept, 1, 2), 0)
        tl.store(status + at + lane, kind.to(tl.uint8), mask=there)


def launch(
    *, table: Tensor, canvas: Tensor, state: Tensor, row: Tensor, cu_seqlens: Tensor, positions: Tensor, first: Tensor,
    listed: Tensor, votes: Tensor, status: Tensor, progress: Tensor, decoded: Tensor, owner: Tensor, own: int,
    processed: int, importance: str, first_step: str, reach: str, history: str, block: int = 0,
    scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write all outputs, and to the state that decided tokens are counted."""
    sequences, positions_of_block = listed.shape
    focus_requests_kernel[(sequences + 1,)](
        table, canvas, state, row, cu_seqlens, positions, first, listed, votes, status, progress, decoded, owner,
        state.stride(0), sequences, positions.shape[0], own, PROCESSED=processed, MASKED=importance == "masked",
        WHOLE=first_step == "whole", PREFILLS=first_step == "prefill", OF_BLOCK=reach == "block",
        COUNTS_BLOCK=history == "block", POSITIONS=positions_of_block, BLOCK=power_of_two(positions_of_block, 1 << 16),
        AT_ONCE=AT_ONCE,
    )  # fmt: skip
