"""page_bounds: an upper bound of the attention of each sequence's voting rows to each page's keys, per set of heads.

The formula is that of the operator's record (`mosaic.registrar.operators.page_bounds`; Quest, section 3): the positive
part of a query is multiplied with the largest key, the negative part with the least. Float32 inside (float64 for
float64). Legend: T rows, E rows of pages, Z sparse layers, M pages, S columns, B sequences, N query heads, K KV heads,
H size, A rows times heads of a tile.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby, product
from typing import Final

import numpy as np
import torch
from torch import Tensor

from mosaic.kernels.key_mass import EXTREMES, voters_of
from mosaic.kernels.shared.attention import tile_shape
from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.extents import windows
from mosaic.kernels.shared.scratch import beginning, tiles_of
from mosaic.registrar.tiles import KEY_ROWS

BEGINNING: Final = {"mean": 0.0, "max": -math.inf, "worst": math.inf}
"""A statistic of no rows."""


def bind(
    *, q: Tensor, extrema: Tensor, page_table: Tensor, cu_pages: Tensor, votes: Tensor, cu_seqlens: Tensor,
    bound: Tensor, positions: Tensor | None = None, slot: int, kv_heads: int, head_size: int, sets: int,
    columns: int = 0, page_span: int = 0, statistic: str = "mean", block: int = 0, rows: int = 0, tiles: int = 1,
    scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write the bounds of pages into bound [sets * tiles, S]; pages, lengths, votes and positions are read on the host."""
    members = q.shape[1] // (sets * head_size)
    query, above, pages, scores, total, column, other, *wide = tiles_of(
        "page_bounds", scratch, {"q": q}, head_size=head_size
    )
    q_STMH = q.view(q.shape[0], sets, members, head_size).transpose(0, 1)
    pages_of = extrema.view(extrema.shape[0], -1, 2, kv_heads, head_size)[:, slot]

    def run() -> None:
        bounds = cu_pages.tolist()
        for sequence, start, end in windows(cu_seqlens, 0, q.shape[0]):
            low, high = bounds[sequence : sequence + 2]
            voting = votes[start:end].tolist()
            if not any(voting):
                continue
            where = None if positions is None else positions[start:end].tolist()
            by_tile = [_runs(voters, start) for voters in voters_of(voting, where, block, rows, tiles)]
            for first in range(low, high, KEY_ROWS):
                some = page_table[first : min(first + KEY_ROWS, high)]
                for number, (own, voters) in enumerate(product(range(sets), by_tile)):
                    least, largest = _gathered(pages_of[:, :, own // (sets // kv_heads)], some, pages, wide)
                    found, said = total[: len(some)].fill_(BEGINNING[statistic]), 0
                    for part in _parts(q_STMH[own], voters, tile_shape(KEY_ROWS, in_place=False)[0]):
                        packed = beginning(query, part.shape).copy_(part).flatten(0, 1)
                        positive = torch.clamp(packed, min=0, out=beginning(above, packed.shape))
                        s = beginning(scores, (len(packed), len(some)))
                        torch.mm(positive, largest.T, out=s)
                        s.addmm_(packed.clamp_(max=0), least.T)
                        said += len(packed)
                        if statistic == "mean":
                            found.add_(torch.sum(s, 0, out=column[: len(some)]))
                        else:
                            of_rows, of_both = EXTREMES[statistic]
                            of_both(found, of_rows(s, 0, out=column[: len(some)]), out=found)
                    if statistic == "mean":
                        np.divide(found.numpy(), said, out=found.numpy())
                    bound[number, first : first + len(some)].copy_(_ordered(found, column, other))

    return run


launch = launcher(bind)


def _runs(votes: Sequence[int], start: int) -> list[tuple[int, int]]:
    """Neighbouring rows that vote: the first, and the end."""
    rows = [
        [row for row, _ in run] for vote, run in groupby(enumerate(votes, start), key=lambda row: row[1] != 0) if vote
    ]
    return [(run[0], run[-1] + 1) for run in rows]


def _parts(q_TMH: Tensor, runs: Sequence[tuple[int, int]], most: int) -> Iterator[Tensor]:
    """Rows and heads of these runs, at most `most` at a time."""
    members = min(q_TMH.shape[1], most)
    tokens = most // members
    for start, end in runs:
        for row in range(start, end, tokens):
            for member in range(0, q_TMH.shape[1], members):
                yield q_TMH[row : min(row + tokens, end), member : member + members]


def _gathered(rows_E2H: Tensor, some: Tensor, pages: Tensor, wide: Sequence[Tensor]) -> Tensor:
    """The elementwise extrema of some pages' keys, [2, S, H] in the compute dtype."""
    shape = (2, len(some), rows_E2H.shape[2])
    found = beginning(pages, shape)
    for which, keys in enumerate(found):
        torch.index_select(rows_E2H[:, which], 0, some, out=keys)
    return beginning(wide[0], shape).copy_(found) if wide else found


def _ordered(found: Tensor, column: Tensor, other: Tensor) -> Tensor:
    """(1 + max(v, 0)) / (1 + max(-v, 0)), in `column`; NumPy allocates nothing for the numbers."""
    v, over, under = found.numpy(), column.numpy()[: len(found)], other.numpy()[: len(found)]
    np.add(np.maximum(v, 0, out=over), 1, out=over)
    np.subtract(1, np.minimum(v, 0, out=under), out=under)
    np.divide(over, under, out=over)
    return column[: len(found)]


def reference(
    *, q: Tensor, extrema: Tensor, page_table: Tensor, cu_pages: Tensor, votes: Tensor, cu_seqlens: Tensor,
    positions: Tensor | None = None, slot: int, kv_heads: int, head_size: int, sets: int, columns: int = 0, page_span: int = 0,
    statistic: str = "mean", block: int = 0, rows: int = 0, tiles: int = 1,
) -> Tensor:  # fmt: skip
    """Return the bounds in plain PyTorch; `columns` is needed; unwritten elements are NaN."""
    bound = torch.full((sets, tiles, columns), float("nan"), dtype=q.dtype)
    pages_of = extrema.view(extrema.shape[0], -1, 2, kv_heads, head_size)[:, slot].repeat_interleave(
        sets // kv_heads, dim=2
    )
    for sequence, start, end in windows(cu_seqlens, 0, q.shape[0]):
        low, high = cu_pages[sequence : sequence + 2].tolist()
        voting = votes[start:end] != 0
        if low == high or not voting.any():
            continue
        least, largest = pages_of[page_table[low:high]].permute(1, 2, 3, 0)[:, :, None]
        for tile in range(tiles):
            voters = voting if positions is None else voting & (positions[start:end] % block // rows == tile)
            q_TD = q[start:end][voters if voters.any() else voting]
            q_SAH1 = q_TD.view(len(q_TD), sets, -1, head_size).transpose(0, 1).flatten(1, 2)[..., None]
            upper = torch.maximum(q_SAH1 * least, q_SAH1 * largest).sum(2)
            v = upper.mean(1) if statistic == "mean" else EXTREMES[statistic][0](upper, 1)
            bound[:, tile, low:high] = (1 + v.clamp(min=0)) / (1 + (-v).clamp(min=0))
    return bound.flatten(0, 1)
