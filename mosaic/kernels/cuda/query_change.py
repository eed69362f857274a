"""query_change on CUDA: the relative change of each sequence's queries since they were kept; refreshes replace them.

One program per row writes its two sums to scratch, or writes a refreshed row; one program per sequence adds up its
rows' sums. So a change depends on no other sequence. Legend: T query rows, C columns, E owners, M rows of a block, B
sequences.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import power_of_two, tl, triton
from mosaic.kernels.cuda.shared.scratch import floats_of
from mosaic.kernels.cuda.shared.sequences import SEQUENCES, find_tile

# Untuned defaults.
COLUMNS: Final = 2048
"""Most columns that a program has at a time."""
ROWS: Final = 64
"""Rows whose sums a program has at a time."""
WARPS: Final = 4


@triton.jit(do_not_specialize=["rows", "sequences"])
def row_change_kernel(
    q,
    kept,
    owner,
    prefix,
    cu_seqlens,
    positions,
    refreshed,
    sums,
    q_stride,
    kept_stride,
    rows,
    sequences,
    WIDTH: tl.constexpr,
    FRESH: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of q: what its difference and the kept one add up to, squared; or the row is kept."""
    row, end, number = find_tile(tl.program_id(0), cu_seqlens, sequences, 0, rows, 1, SEQUENCES)
    if row >= end:
        return
    before = tl.load(prefix + number)
    if before == 0:
        return
    place = tl.load(positions + row) - before
    mine = kept + tl.load(owner + number) * kept_stride + place.to(tl.int64) * WIDTH
    new = row < 0
    if FRESH:
        new = tl.load(refreshed + number) != 0
    column = tl.arange(0, BLOCK)
    difference = tl.zeros([BLOCK], tl.float32)
    magnitude = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        inside = start + column < WIDTH
        query = tl.load(q + row.to(tl.int64) * q_stride + start + column, mask=inside, other=0.0)
        if new:
            tl.store(mine + start + column, query, mask=inside & (place >= 0))
        else:
            earlier = tl.load(mine + start + column, mask=inside, other=0.0).to(tl.float32)
            apart = earlier - query.to(tl.float32)
            difference += apart * apart
            magnitude += earlier * earlier
    tl.store(sums + 2 * row, tl.sum(difference, 0))
    tl.store(sums + 2 * row + 1, tl.sum(magnitude, 0))


@triton.jit
def change_kernel(prefix, cu_seqlens, sums, change, ROWS: tl.constexpr):
    """The change of one sequence, from the sums of its rows."""
    number = tl.program_id(0)
    first = tl.load(cu_seqlens + number)
    last = tl.load(cu_seqlens + number + 1)
    last = tl.where(tl.load(prefix + number) > 0, last, first)
    difference = tl.zeros([ROWS], tl.float32)
    magnitude = tl.zeros([ROWS], tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        difference += tl.load(sums + 2 * row, mask=row < last, other=0.0)
        magnitude += tl.load(sums + 2 * row + 1, mask=row < last, other=0.0)
    apart = tl.sum(difference, 0)
    # where nothing differs, nothing was divided by nothing
    relative = tl.sqrt(apart / tl.where(apart == 0.0, 1.0, tl.sum(magnitude, 0)))
    tl.store(change + number, relative)


def launch(
    *, q: Tensor, kept: Tensor, owner: Tensor, prefix: Tensor, cu_seqlens: Tensor, positions: Tensor, change: Tensor, rows: int,
    refreshed: Tensor | None = None, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the changes into change [B], and new queries into their rows of kept [E, M*C]."""
    (count, width), sequences = q.shape, cu_seqlens.shape[0] - 1
    sums = floats_of("query_change", scratch, 2 * count)
    row_change_kernel[(count,)](
        q,
        kept,
        owner,
        prefix,
        cu_seqlens,
        positions,
        prefix if refreshed is None else refreshed,
        sums,
        q.stride(0),
        kept.stride(0),
        count,
        sequences,
        WIDTH=width,
        FRESH=refreshed is not None,
        SEQUENCES=power_of_two(sequences, 1 << 16, least=SEQUENCES),
        BLOCK=power_of_two(width, COLUMNS),
        num_warps=WARPS,
    )
    change_kernel[(sequences,)](prefix, cu_seqlens, sums, change, ROWS=ROWS, num_warps=1)
