"""advance_requests: a table of requests after a step, and what the step says of each that it has served.

report overlaps no operand. Legend: S requests, C columns, B windows.
"""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.requests import closes
from mosaic.registrar.operators.advance_requests import WIDTH
from mosaic.registrar.operators.read_canvas import OPEN
from mosaic.registrar.request_table import CANVAS_LONG, ENDED, EOS, LENGTH, STOPS, WHOLE, Column, Reported


def bind(
    *, table: Tensor, canvas: Tensor, row: Tensor, begin: Tensor, cu_seqlens: Tensor, cu_rows: Tensor, committed:
    Tensor, report: Tensor, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Update the table, and write the report."""
    columns, kept, taken, said = table.numpy(), canvas.numpy(), committed.numpy(), report.numpy()
    requests, begins, tokens, rows = (each.numpy() for each in (row, begin, cu_seqlens, cu_rows))

    def run() -> None:
        said.fill(0)
        said[:, Reported.ROW] = -1
        windows = zip(
            requests.tolist(), begins.tolist(), pairwise(tokens.tolist()), pairwise(rows.tolist()), strict=True
        )
        for i, (request, first, (start, end), (from_row, to_row)) in enumerate(windows):
            if request < 0:
                return
            if start == end:
                columns[request, Column.SERVED] -= len(said) - i
                continue
            column, line = columns[request], said[i]
            line[Reported.ROW], line[Reported.BEGIN], line[Reported.TOKENS] = request, first, end - start
            closing = bool(closes(columns[request : request + 1])[0])
            line[Reported.START], line[Reported.ROWS] = column[Column.START] - closing * column[Column.BEFORE], to_row
            if column[Column.WRITTEN] < column[Column.PREFIX]:
                column[Column.WRITTEN] += end - start
            else:
                column[Column.OPEN] -= int(taken[from_row:to_row].sum())
                column[Column.STEP] += 1
                column[Column.NUMBER] += not closing
                column[Column.BEFORE] = 0
            _report(column, kept[column[Column.CANVAS] :], line)

    return run


launch = launcher(bind)


def _report(column: np.ndarray, tokens: np.ndarray, line: np.ndarray) -> None:
    """Say how a request stands, whose block may be done now, and go on to the next block then."""
    start, stop, end = (
        int(column[Column.START]),
        int(column[Column.START] + column[Column.BLOCK]),
        int(column[Column.END]),
    )
    open_ = (tokens[start : min(stop, end)] == OPEN).nonzero()[0]
    final = start + int(open_[0]) if len(open_) else min(stop, end)
    line[Reported.MASKED] = len(open_) + max(end - stop, 0)
    first = max(start, int(column[Column.PROMPT]))
    stops = np.isin(tokens[first:final], column[Column.STOP : Column.STOP + STOPS]).nonzero()[0]
    ended = EOS if len(stops) else LENGTH if final == end else 0
    line[Reported.FINAL] = first + stops[0] + 1 if ended == EOS else final
    line[Reported.END] = ended
    if ended:
        column[Column.STATE] = ENDED
    elif not column[Column.OPEN]:
        column[Column.START] = start = stop
        column[Column.OPEN] = min(column[Column.BLOCK], column[Column.LENGTH] - stop)
        column[Column.BEFORE] = 0 if stop % column[Column.SPAN] else column[Column.SPAN]
        if column[Column.BEFORE] or column[Column.SPAN] == CANVAS_LONG:
            column[Column.NUMBER] = 0
    waits = column[Column.SHIFTED] and column[Column.OPEN] and tokens[start] == OPEN
    column[Column.WIDE] = column[Column.WINDOW] == WHOLE or column[Column.NUMBER] == 0 or waits
    line[Reported.WRITTEN :] = column[Column.WRITTEN :]


def reference(
    *, table: Tensor, canvas: Tensor, row: Tensor, begin: Tensor, cu_seqlens: Tensor, cu_rows: Tensor, committed: Tensor
) -> dict[str, Tensor]:
    """Return the table after the step and the report, a position at a time, in plain Python."""
    after, report = table.clone(), torch.zeros(len(row), WIDTH, dtype=torch.int64)
    report[:, Reported.ROW] = -1
    for i, request in enumerate(row.tolist()):
        if request < 0:
            break
        own, length = after[request].tolist(), int(cu_seqlens[i + 1] - cu_seqlens[i])
        if not length:
            after[request, Column.SERVED] -= len(row) - i
            continue
        tokens = canvas[own[Column.CANVAS] : own[Column.CANVAS] + own[Column.LENGTH]].tolist()
        closes = own[Column.SHIFTED] == 1 and own[Column.BEFORE] > 0
        line = [request, int(begin[i]), length, own[Column.START] - own[Column.BEFORE] * closes]
        if own[Column.WRITTEN] < own[Column.PREFIX]:
            own[Column.WRITTEN] += length
        else:
            own[Column.OPEN] -= int(committed[int(cu_rows[i]) : int(cu_rows[i + 1])].sum())
            own[Column.STEP], own[Column.BEFORE] = own[Column.STEP] + 1, 0
            own[Column.NUMBER] += 0 if closes else 1
        end, stop = own[Column.END], own[Column.START] + own[Column.BLOCK]
        final = next((p for p in range(own[Column.START], min(stop, end)) if tokens[p] == OPEN), min(stop, end))
        masked = sum(token == OPEN for token in tokens[own[Column.START] : end])
        stops = own[Column.STOP : Column.STOP + STOPS]
        found = [
            p for p in range(max(own[Column.START], own[Column.PROMPT]), final) if tokens[p] in stops and tokens[p] >= 0
        ]
        ended = EOS if found else LENGTH if final == end else 0
        if ended:
            own[Column.STATE] = ENDED
        elif own[Column.OPEN] == 0:
            span = own[Column.SPAN]
            own[Column.START], own[Column.BEFORE] = stop, span if stop // span * span == stop else 0
            if stop // span * span == stop or span == CANVAS_LONG:
                own[Column.NUMBER] = 0
            own[Column.OPEN] = min(own[Column.BLOCK], own[Column.LENGTH] - stop)
        undecided = own[Column.SHIFTED] == 1 and own[Column.OPEN] > 0 and tokens[own[Column.START]] == OPEN
        own[Column.WIDE] = int(own[Column.WINDOW] == WHOLE or own[Column.NUMBER] == 0 or undecided)
        state = [found[0] + 1 if found else final, masked, ended, int(cu_rows[i + 1])]
        report[i] = torch.tensor([*line, *state, *own[Column.WRITTEN :]])
        after[request] = torch.tensor(own)
    return {"table": after, "report": report}
