"""resume_rows: positions of the kept rows, and the rows to decide among them.

Outputs overlap no operand. Legend: S numbers of tokens, C rows kept, T tokens, M rows asked for, D rows decided, B sequences.
"""

from itertools import pairwise

import torch
from torch import Tensor


def launch(
    *, chosen: Tensor, bounds: Tensor, positions: Tensor, rows: Tensor, cu_rows: Tensor, kept: Tensor, kept_positions: Tensor,
    decided: Tensor, asked: Tensor, cu_decided: Tensor, place: Tensor, size: int = 0, most: int = 0, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write all outputs; bounds and rows are read on the host."""
    kept.copy_(chosen[: kept.numel()])
    torch.index_select(positions, 0, kept, out=kept_positions)
    for whole in (decided, asked, cu_decided):
        whole.zero_()
    place.fill_(-1)
    places, wanted, found = {token: i for i, token in enumerate(kept[: int(bounds[-1])].tolist())}, rows.tolist(), 0
    of_kept, of_asked, of_rows, ends = (out.numpy() for out in (decided, asked, place, cu_decided))
    for sequence, (start, end) in enumerate(pairwise(cu_rows.tolist())):
        for row in range(start, end):
            if wanted[row] in places:
                of_kept[found], of_asked[found], of_rows[row] = places[wanted[row]], row, found
                found += 1
        ends[sequence + 1] = found


def reference(
    *, chosen: Tensor, bounds: Tensor, positions: Tensor, rows: Tensor, cu_rows: Tensor, size: int, most: int
) -> dict[str, Tensor]:
    """Return all outputs in plain PyTorch, a row at a time."""
    kept = chosen[:size]
    place = torch.full(rows.shape, -1, dtype=torch.int32)
    decided, asked = (torch.zeros(most, dtype=torch.int64) for _ in range(2))
    found = 0
    for row in range(int(cu_rows[-1])):
        where = (kept[: int(bounds[-1])] == rows[row]).nonzero().view(-1)
        if len(where):
            decided[found], asked[found], place[row] = where[0], row, found
            found += 1
    below = [int((place[: int(end)] >= 0).sum()) for end in cu_rows]
    return {
        "kept": kept,
        "kept_positions": positions[kept],
        "decided": decided,
        "asked": asked,
        "cu_decided": torch.tensor(below, dtype=torch.int32),
        "place": place,
    }
