"""resume_rows on CUDA: positions of the kept rows, and the rows to decide among them, in two launches.

In the first launch one program per sequence looks up its rows among the kept ones and counts those found. In the second
each adds up the counts before its own and writes its rows; one more program writes the padding. Scratch: a count per
sequence. Nothing is read on the host. Legend: S numbers of tokens, C rows kept, T tokens, M rows asked for, D rows
decided, B sequences.
"""

from typing import Final

import torch
from torch import Tensor

from mosaic.kernels.cuda.shared.launching import power_of_two, tl, triton
from mosaic.kernels.cuda.shared.scratch import floats_of

# Untuned defaults: rows asked for and rows kept of a tile, elements that are copied, sequences that are added up at once.
ROWS: Final = 32
KEPT: Final = 64
COPIED: Final = 256
SEQUENCES: Final = 256


@triton.jit(do_not_specialize=["sequences", "size", "tokens"])
def find_kernel(
    chosen,
    bounds,
    positions,
    rows,
    cu_rows,
    kept,
    kept_positions,
    place,
    counts,
    sequences,
    size,
    tokens,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    COPIED: tl.constexpr,
):
    sequence = tl.program_id(0)
    if sequence == sequences:  # all that is kept
        for first in range(0, size, COPIED):
            at = first + tl.arange(0, COPIED)
            token = tl.load(chosen + at, mask=at < size, other=0)
            tl.store(kept + at, token, mask=at < size)
            inside = (at < size) & (token >= 0) & (token < tokens)
            tl.store(kept_positions + at, tl.load(positions + token, mask=inside, other=0), mask=at < size)
    else:
        start = tl.load(bounds + sequence)
        stop = tl.load(bounds + sequence + 1)
        last = tl.load(cu_rows + sequence + 1)
        total = start * 0
        for first in range(tl.load(cu_rows + sequence), last, ROWS):
            row = first + tl.arange(0, ROWS)
            wanted = tl.load(rows + row, mask=row < last, other=-1)
            where = tl.zeros([ROWS], tl.int32)
            for begin in range(start, stop, KEPT):
                at = begin + tl.arange(0, KEPT)
                token = tl.load(chosen + at, mask=at < stop, other=-2)
                same = wanted[:, None] == token[None, :]
                where += tl.sum(tl.where(same, at[None, :] + 1, 0), 1)
            tl.store(place + row, where - 1, mask=row < last)
            total += tl.sum((where > 0).to(tl.int32), 0)
        tl.store(counts + sequence, total)


@triton.jit(do_not_specialize=["sequences", "most", "asked_rows"])
def write_kernel(
    cu_rows,
    decided,
    asked,
    cu_decided,
    place,
    counts,
    sequences,
    most,
    asked_rows,
    ROWS: tl.constexpr,
    COPIED: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    sequence = tl.program_id(0)
    before = sequence * 0
    for first in range(0, sequence, SEQUENCES):
        other = first + tl.arange(0, SEQUENCES)
        before += tl.sum(tl.load(counts + other, mask=other < sequence, other=0), 0)
    tl.store(cu_decided + sequence, before)
    if sequence == sequences:
        for first in range(before, most, COPIED):
            at = first + tl.arange(0, COPIED)
            tl.store(decided + at, tl.zeros([COPIED], tl.int64), mask=at < most)
            tl.store(asked + at, tl.zeros([COPIED], tl.int64), mask=at < most)
        for first in range(tl.load(cu_rows + sequences), asked_rows, COPIED):
            row = first + tl.arange(0, COPIED)
            tl.store(place + row, tl.full([COPIED], -1, tl.int32), mask=row < asked_rows)
    else:
        last = tl.load(cu_rows + sequence + 1)
        for first in range(tl.load(cu_rows + sequence), last, ROWS):
            row = first + tl.arange(0, ROWS)
            where = tl.load(place + row, mask=row < last, other=-1)
            found = (where >= 0).to(tl.int32)
            at = before + tl.cumsum(found, 0) - found
            mine = (found > 0) & (at < most)
            tl.store(decided + at, where.to(tl.int64), mask=mine)
            tl.store(asked + at, row.to(tl.int64), mask=mine)
            tl.store(place + row, tl.where(mine, at, -1), mask=row < last)
            before += tl.sum(found, 0)


def launch(
    *, chosen: Tensor, bounds: Tensor, positions: Tensor, rows: Tensor, cu_rows: Tensor, kept: Tensor, kept_positions: Tensor,
    decided: Tensor, asked: Tensor, cu_decided: Tensor, place: Tensor, size: int = 0, most: int = 0, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write all outputs."""
    sequences = bounds.shape[0] - 1
    counts = floats_of("resume_rows", scratch, bounds.shape[0]).view(torch.int32)
    find_kernel[(sequences + 1,)](
        chosen,
        bounds,
        positions,
        rows,
        cu_rows,
        kept,
        kept_positions,
        place,
        counts,
        sequences,
        kept.shape[0],
        positions.shape[0],
        ROWS=ROWS,
        KEPT=KEPT,
        COPIED=COPIED,
    )
    write_kernel[(sequences + 1,)](
        cu_rows,
        decided,
        asked,
        cu_decided,
        place,
        counts,
        sequences,
        decided.shape[0],
        rows.shape[0],
        ROWS=ROWS,
        COPIED=COPIED,
        SEQUENCES=power_of_two(sequences, SEQUENCES),
    )
