"""Shared by kernels over sequences of rows: the rows of a tile, the sequences of rows, the keys of a split."""

from typing import Final

from mosaic.kernels.cuda.shared.launching import tl, triton

SEQUENCES: Final = 16
"""Least sequences that a kernel is compiled for, beyond them powers of two."""


@triton.jit
def find_tile(
    tile, cu_seqlens, sequences, row_start, rows, TOKENS: tl.constexpr, SEQUENCES: tl.constexpr, fewest=0, most=2147483647,
):  # fmt: skip
    """Where a tile lies among the tiles that the sequences' rows of this slice are cut into; of those sequences that have from
    `fewest` to `most` rows, in this slice or not.

    Its first row, the end of the sequence's rows, and the sequence; all 0 beyond the last tile.
    """
    sequence = tl.arange(0, SEQUENCES)
    known = sequence < sequences
    from_row = tl.load(cu_seqlens + sequence, mask=known, other=0)
    to_row = tl.load(cu_seqlens + sequence + 1, mask=known, other=0)
    start = tl.maximum(from_row - row_start, 0)
    end = tl.minimum(to_row - row_start, rows)
    known = known & (to_row - from_row >= fewest) & (to_row - from_row <= most)
    tiles = tl.where(known & (end > start), (end - start + TOKENS - 1) // TOKENS, 0)
    before = tl.cumsum(tiles, 0) - tiles
    mine = (tile >= before) & (tile < before + tiles)
    first = tl.sum(tl.where(mine, start + (tile - before) * TOKENS, 0), 0)
    return first, tl.sum(tl.where(mine, end, 0), 0), tl.sum(tl.where(mine, sequence, 0), 0)


@triton.jit
def first_sequence(row, cu_seqlens, sequences, SEQUENCES: tl.constexpr):
    """The first sequence that ends after a row; `sequences` if none does."""
    sequence = tl.arange(0, SEQUENCES)
    end = tl.load(cu_seqlens + sequence + 1, mask=sequence < sequences, other=0x7FFFFFFF)
    return tl.sum((end <= row).to(tl.int32), 0)


@triton.jit
def share_of(keys, splits, BLOCK_K: tl.constexpr, LEAST: tl.constexpr):
    """The keys of one split, of those of a sequence: whole tiles, and enough to be worth a program."""
    return tl.maximum(tl.cdiv(tl.cdiv(keys, splits), BLOCK_K) * BLOCK_K, LEAST)
