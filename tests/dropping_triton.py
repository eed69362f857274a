"""The kernels of `dropping.py` as a user may write them for a card."""

import triton
import triton.language as tl


@triton.jit
def weigh_rows(q, weight, stride, columns, B: tl.constexpr):
    """The sum of a row; one program a row."""
    row = tl.program_id(0)
    total = 0.0
    for start in range(0, columns, B):
        column = start + tl.arange(0, B)
        values = tl.load(q + row * stride + column, mask=column < columns, other=0.0)
        total += tl.sum(values.to(tl.float32), 0)
    tl.store(weight + row, total)


@triton.jit
def select_rows(before, after, limit, cu_seqlens, rows, bounds, total, sequences, tokens, B: tl.constexpr):
    """One program walks over all sequences, each from its last token to its first."""
    found = 0
    tl.store(bounds, found)
    for sequence in range(0, sequences):
        first = tl.load(cu_seqlens + sequence)
        end = tl.load(cu_seqlens + sequence + 1)
        least = tl.load(limit + sequence)
        for start in range(0, end - first, B):
            token = end - 1 - start - tl.arange(0, B)
            inside = token >= first
            weight = tl.load(after + token, mask=inside, other=0.0) - tl.load(before + token, mask=inside, other=0.0)
            kept = inside & ((weight >= least) | (token == first))
            place = found + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(rows + place, token.to(tl.int64), mask=kept)
            found += tl.sum(kept.to(tl.int32), 0)
        tl.store(bounds + sequence + 1, found)
    tl.store(total, found.to(tl.int64))
    for start in range(found, tokens, B):
        place = start + tl.arange(0, B)
        tl.store(rows + place, tl.zeros([B], tl.int64), mask=place < tokens)
