"""note_focus: what a step has kept and decided of requests of a table.

Legend: B windows, M rows to decide.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from mosaic.kernels.focus_requests import DECIDED, KEPT, steps_before
from mosaic.kernels.shared.binding import Run, launcher
from mosaic.registrar.request_table import Column


def bind(
    *, table: Tensor, state: Tensor, row: Tensor, cu_seqlens: Tensor, cu_rows: Tensor, seen: Tensor, committed: Tensor,
    own: int, processed: int, first_step: str, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Update the state."""
    columns, states, taken, ends = table.numpy(), state.numpy(), committed.numpy(), seen.numpy()
    requests, kept, rows = row.numpy(), cu_seqlens.numpy(), cu_rows.numpy()

    def run() -> None:
        bounds = zip(pairwise(kept.tolist()), pairwise(rows.tolist()), strict=True)
        for i, (request, ((start, end), (from_row, to_row))) in enumerate(zip(requests.tolist(), bounds, strict=True)):
            column = columns[request]
            of_none = request < 0 or column[own] < 0 or start == end
            if of_none or (steps := steps_before(column, first_step)) < 0:
                continue
            mine = states[column[own]]
            mine[KEPT] = max(mine[KEPT] if steps else processed, ends[i] - column[Column.START])
            mine[DECIDED] = taken[from_row:to_row].sum()

    return run


launch = launcher(bind)


def reference(
    *, table: Tensor, state: Tensor, row: Tensor, cu_seqlens: Tensor, cu_rows: Tensor, seen: Tensor, committed: Tensor,
    own: int, processed: int, first_step: str,
) -> Tensor:  # fmt: skip
    """Return the state afterwards, a row to decide at a time, in plain Python."""
    after = state.clone()
    for i, request in enumerate(row.tolist()):
        if request < 0 or cu_seqlens[i] == cu_seqlens[i + 1]:
            continue
        asked = table[request].tolist()
        if asked[own] < 0:
            continue
        number, prefills = asked[Column.NUMBER], first_step == "prefill" and asked[Column.START] < asked[Column.PROMPT]
        if prefills and not number:
            continue
        before = processed if number == int(prefills) else int(state[asked[own], 2])
        after[asked[own], 2] = max(before, int(seen[i]) - asked[Column.START])
        after[asked[own], 3] = sum(int(committed[m]) for m in range(int(cu_rows[i]), int(cu_rows[i + 1])))
    return after
