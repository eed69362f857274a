"""select_requests: how the requests that a step serves attend to selected keys, and which of them select.

Outputs overlap no operand. Legend: S requests, T tokens, B windows.
"""

import numpy as np
import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.requests import marked
from mosaic.registrar.request_table import MARKED_STEPS, Column


def bind(
    *, table: Tensor, row: Tensor, seen: Tensor, cu_seqlens: Tensor, positions: Tensor, owner: Tensor, captured: Tensor,
    candidates: Tensor, seen_exactly: Tensor, seen_sparsely: Tensor, cu_keys: Tensor, votes: Tensor, own: int, carried: bool =
    False, answer: bool = False, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write all outputs."""
    columns, requests, keys, bounds, places = (each.numpy() for each in (table, row, seen, cu_seqlens, positions))
    outputs = [each.numpy() for each in (owner, captured, candidates, seen_exactly, seen_sparsely, cu_keys, votes)]
    owners, prefixes, ranked, exactly, sparsely, of_keys, voting = outputs

    def run() -> None:
        for values in outputs:
            values.fill(0)
        count = int((requests >= 0).sum())
        mine = columns[requests[:count]]
        column, has = mine.T, mine[:, own] >= 0
        start, block, selects = column[Column.START] * has, column[Column.BLOCK], marked(mine) & has
        carries = carried & has & (column[Column.NUMBER] == 0) & (start - block >= column[Column.PREFIX])
        owners[:count] = np.maximum(column[own], 0)
        prefixes[:count] = start - block * carries
        ranked[:count] = start * selects
        exactly[:count] = keys[:count] * (selects & ~carries | ~has)
        sparsely[:count] = keys[:count] - exactly[:count]
        np.cumsum(keys, out=of_keys[1:])
        first = np.maximum(start, column[Column.PROMPT] * answer)
        tokens = bounds[count]
        lengths = np.diff(bounds[: count + 1])
        voting[:tokens] = (places[:tokens] >= np.repeat(first, lengths)) & np.repeat(has, lengths)

    return run


launch = launcher(bind)


def reference(
    *, table: Tensor, row: Tensor, seen: Tensor, cu_seqlens: Tensor, positions: Tensor, own: int, carried: bool = False,
    answer: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """Return all outputs, a window at a time, in plain Python."""
    owner, captured, candidates, exactly, sparsely, bounds = ([0] * len(row) for _ in range(6))
    votes = [0] * len(positions)
    for i, request in enumerate(row.tolist()):
        if request < 0:
            break
        line, keys = table[request].tolist(), int(seen[i])
        bounds[i] = keys
        if line[own] < 0:
            exactly[i] = keys
            continue
        start, before = line[Column.START], line[Column.START] - line[Column.BLOCK]
        selects = bool(line[Column.MARKS] >> min(line[Column.NUMBER], MARKED_STEPS) & 1)
        carries = carried and line[Column.NUMBER] == 0 and before >= line[Column.PREFIX]
        owner[i], captured[i], candidates[i] = line[own], before if carries else start, start if selects else 0
        exactly[i] = keys if selects and not carries else 0
        sparsely[i] = keys - exactly[i]
        for t in range(int(cu_seqlens[i]), int(cu_seqlens[i + 1])):
            votes[t] = positions[t] >= (max(start, line[Column.PROMPT]) if answer else start)
    ints = {"captured": captured, "candidates": candidates, "seen_exactly": exactly, "seen_sparsely": sparsely}
    return {
        "owner": torch.tensor(owner), **{name: torch.tensor(values, dtype=torch.int32) for name, values in ints.items()},
        "cu_keys": torch.tensor([0, *bounds]).cumsum(0).int(), "votes": torch.tensor(votes, dtype=torch.uint8),
    }  # fmt: skip
