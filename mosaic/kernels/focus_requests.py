"""focus_requests: what evict_tokens goes by of requests of a table.

Outputs overlap no operand. Legend: B windows, T tokens.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np
import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.registrar.operators.read_canvas import OPEN
from mosaic.registrar.request_table import Column

KEPT, DECIDED = 2, 3
"""Columns of the state, of a request of a table."""
COUNTED: Final = -2
"""Instead of a number of decided tokens: it is counted already."""


def bind(
    *, table: Tensor, canvas: Tensor, state: Tensor, row: Tensor, cu_seqlens: Tensor, positions: Tensor, first: Tensor,
    listed: Tensor, votes: Tensor, status: Tensor, progress: Tensor, decoded: Tensor, owner: Tensor, own: int,
    processed: int, importance: str, first_step: str, reach: str, history: str, block: int = 0,
    scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write all outputs, and to the state that decided tokens are counted."""
    columns, tokens, states, places = table.numpy(), canvas.numpy(), state.numpy(), positions.numpy()
    requests, bounds = row.numpy(), cu_seqlens.numpy()
    outputs = [each.numpy() for each in (first, listed, votes, status, progress, decoded, owner)]
    begins, names, voting, statuses, reached, counts, owners = outputs

    def run() -> None:
        for values, nothing in zip(outputs, (0, -1, 0, 0, 0, COUNTED, 0), strict=True):
            values.fill(nothing)
        for i, (request, (start, end)) in enumerate(zip(requests.tolist(), pairwise(bounds.tolist()), strict=True)):
            if request < 0:
                continue
            column = columns[request]
            begins[i] = column[Column.START]
            if column[own] < 0:
                continue
            mine, at = states[column[own]], column[Column.START]
            steps = steps_before(column, first_step)
            kept = int(mine[KEPT]) if steps > 0 else processed
            owners[i] = column[own]
            reached[i] = kept if reach == "block" else 0
            none = steps <= 0 and (history == "block" or column[Column.STEP] == column[Column.NUMBER])
            counts[i] = -1 if none else int(mine[DECIDED])
            mine[DECIDED] = COUNTED
            open_ = tokens[column[Column.CANVAS] + at :][: names.shape[1]] == OPEN
            offsets = places[start:end] - at
            inside = (offsets >= 0) & (offsets < len(open_))
            masked = inside & open_[np.where(inside, offsets, 0)]
            listing = open_.nonzero()[0] if importance == "masked" else np.arange(names.shape[1])
            names[i, : len(listing)] = listing
            voting[start:end] = masked if importance == "masked" else inside
            if steps >= int(first_step == "whole"):
                statuses[start:end] = np.where(masked, np.where(offsets < kept, 1, 2), 0)

    return run


launch = launcher(bind)


def steps_before(column: np.ndarray, first_step: str) -> int:
    """Return the steps of a request's block that have counted; -1: the next one does not count."""
    prefills = first_step == "prefill" and column[Column.START] < column[Column.PROMPT]
    return int(column[Column.NUMBER]) - int(prefills)


def reference(
    *, table: Tensor, canvas: Tensor, state: Tensor, row: Tensor, cu_seqlens: Tensor, positions: Tensor, own: int,
    block: int, processed: int, importance: str, first_step: str, reach: str, history: str,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the state afterwards and all outputs, a token at a time, in plain Python."""
    after, windows, tokens = state.clone(), len(row), len(positions)
    first, progress, decoded, owner = [0] * windows, [0] * windows, [COUNTED] * windows, [0] * windows
    listed, votes, status = [[-1] * block for _ in range(windows)], [0] * tokens, [0] * tokens
    for i, request in enumerate(row.tolist()):
        if request < 0:
            continue
        asked = table[request].tolist()
        first[i] = start = asked[Column.START]
        if asked[own] < 0:
            continue
        number = asked[Column.NUMBER]
        prefills = first_step == "prefill" and start < asked[Column.PROMPT]
        begins, counts = number == int(prefills), number >= int(prefills)
        kept = int(state[asked[own], 2]) if counts and not begins else processed
        none = (begins or not counts) and (history == "block" or number == asked[Column.STEP])
        owner[i], progress[i] = asked[own], kept if reach == "block" else 0
        decoded[i] = -1 if none else int(state[asked[own], 3])
        after[asked[own], 3] = COUNTED
        own_tokens = canvas[asked[Column.CANVAS] :].tolist()
        masks = [offset for offset in range(block) if own_tokens[start + offset] == OPEN]
        names = masks if importance == "masked" else range(block)
        listed[i] = [*names, *[-1] * (block - len(names))]
        for t in range(int(cu_seqlens[i]), int(cu_seqlens[i + 1])):
            offset = int(positions[t]) - start
            votes[t] = int(offset in names)
            if offset in masks and counts and not (begins and first_step == "whole"):
                status[t] = 1 if offset < kept else 2
    whole = {"first": first, "listed": listed, "progress": progress, "decoded": decoded}
    return {
        "state": after, "owner": torch.tensor(owner), "votes": torch.tensor(votes, dtype=torch.uint8),
        "status": torch.tensor(status, dtype=torch.uint8),
        **{name: torch.tensor(values, dtype=torch.int32) for name, values in whole.items()},
    }  # fmt: skip
