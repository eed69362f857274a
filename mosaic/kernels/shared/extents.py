"""Extents of rows that keys and values are kept in: where the key of a position lies, on the CPU.

`mosaic.registrar.operators.kv_store` describes extents. Legend: R rows, L layers, K KV heads, H head size, B sequences,
X extents, n rows of an extent.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor


class Piece(NamedTuple):
    """Keys of a sequence that lie side by side: those of the positions [start, end), as tokens of one extent from `at` on."""

    start: int
    end: int
    row: int
    rows: int
    at: int


def pieces(extents: Tensor, cu_extents: Tensor) -> list[list[Piece]]:
    """List the pieces of each sequence in order of position; the last goes on to the end of its extent."""
    table = [(row, rows, first, before) for row, rows, first, before in extents.tolist()]
    found = []
    for low, high in pairwise(cu_extents.tolist()):
        mine = table[low:high]
        ends = [first for _, _, first, _ in mine[1:]]
        ends += [first + rows - before for _, rows, first, before in mine[-1:]]
        found.append(
            [Piece(first, end, row, rows, before) for (row, rows, first, before), end in zip(mine, ends, strict=True)]
        )
    return found


def kept_tokens(kv: Tensor, piece: Piece, layer: int, heads: int, size: int) -> Tensor:
    """View keys and values of one layer of a piece's tokens, [2, K, n, H]."""
    columns = kv.shape[1]
    first = piece.row * columns + 2 * layer * heads * piece.rows * size
    whole = kv.view(-1)[first : first + 2 * heads * piece.rows * size].view(2, heads, piece.rows, size)
    return whole[:, :, piece.at : piece.at + piece.end - piece.start]


def windows(cu_seqlens: Tensor, row_start: int, rows: int) -> Iterator[tuple[int, int, int]]:
    """Give the sequence, its first row of a slice and the end of them; none that has no row there."""
    for sequence, (first, last) in enumerate(pairwise(cu_seqlens.tolist())):
        start, end = max(first - row_start, 0), min(last - row_start, rows)
        if start < end:
            yield sequence, start, end
