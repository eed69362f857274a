"""advance_requests: a table of requests after a step, and what the step says of each that it has served.

report overlaps no operand. Legend: S requests, C columns, B windows.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from mosaic.kernels.draw_requests import reference_mixed
from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.requests import block_hash, closes, packed_until, widens
from mosaic.registrar.operators.advance_requests import WIDTH
from mosaic.registrar.operators.read_canvas import OPEN
from mosaic.registrar.request_table import (
    ALL_ONES,
    CANVAS_LONG,
    ENDED,
    EOS,
    LENGTH,
    PACKED,
    STOPS,
    WHOLE,
    Column,
    Reported,
)


def bind(
    *, table: Tensor, canvas: Tensor, row: Tensor, begin: Tensor, cu_seqlens: Tensor, cu_rows: Tensor, report: Tensor,
    mask_id: int = 0, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Update the table, and write the report."""
    columns, kept, said = table.numpy(), canvas.numpy(), report.numpy()
    requests, begins, tokens, rows = (each.numpy() for each in (row, begin, cu_seqlens, cu_rows))

    def run() -> None:
        said.fill(0)
        said[:, Reported.ROW] = -1
        windows = zip(requests.tolist(), begins.tolist(), pairwise(tokens.tolist()), rows[1:].tolist(), strict=True)
        for i, (request, first, (start, end), to_row) in enumerate(windows):
            if request < 0:
                return
            if start == end:
                columns[request, Column.SERVED] -= len(said) - i
                continue
            column, line = columns[request], said[i]
            line[Reported.ROW], line[Reported.BEGIN], line[Reported.TOKENS] = request, first, end - start
            closing = bool(closes(columns[request : request + 1])[0])
            line[Reported.START], line[Reported.ROWS] = column[Column.START] - closing * column[Column.BEFORE], to_row
            fills = bool(column[Column.WRITTEN] < column[Column.PREFIX])
            if fills:
                column[Column.WRITTEN] += end - start
            else:
                column[Column.WRITTEN] = packed_until(columns[request : request + 1])[0]
                column[Column.STEP] += 1
                column[Column.NUMBER] += not closing
                column[Column.BEFORE] = 0
            own = kept[column[Column.CANVAS] :]
            _report(column, own, line, done=_is_done(column, own, mask_id, decided=not fills))

    return run


launch = launcher(bind)


def _is_done(column: np.ndarray, tokens: np.ndarray, mask_id: int, *, decided: bool) -> bool:
    """Count what is open in a block, note what editing goes by, and return whether the block is done."""
    start, before = int(column[Column.START]), int(column[Column.OPEN])
    block = tokens[start : start + int(column[Column.BLOCK])]
    left = column[Column.OPEN] = int((block == OPEN).sum())
    if column[Column.DECIDES] != ALL_ONES or not decided:
        return not left
    since = column[Column.SINCE] = 0 if left < before else int(column[Column.SINCE]) + 1
    now = block_hash(block, start)
    as_before = now == int(column[Column.SAVED])
    if (
        not left or since & (since - 1) == 0
    ):  # tokens that go round in a circle come back to those of one of these steps
        column[Column.SAVED] = now
    column[Column.QUOTA] = 1 + as_before * int((block == mask_id).sum())
    return not left and bool(since >= column[Column.POST_STEPS] or (since and as_before))


def _report(column: np.ndarray, tokens: np.ndarray, line: np.ndarray, *, done: bool) -> None:
    """Say how a request stands, and go on to the next block if this one is done."""
    start, stop, end = (
        int(column[Column.START]),
        int(column[Column.START] + column[Column.BLOCK]),
        int(column[Column.END]),
    )
    open_ = (tokens[start : min(stop, end)] == OPEN).nonzero()[0]
    line[Reported.MASKED] = len(open_) + max(end - stop, 0)
    first = max(start, int(column[Column.PROMPT]))
    final = start + int(open_[0]) if len(open_) else min(stop, end)
    if column[Column.DECIDES] == ALL_ONES and not done:
        final = first
    stops = np.isin(tokens[first:final], column[Column.STOP : Column.STOP + STOPS]).nonzero()[0]
    ended = EOS if len(stops) else LENGTH if final == end else 0
    line[Reported.FINAL] = first + stops[0] + 1 if ended == EOS else final
    line[Reported.END] = ended
    if ended:
        column[Column.STATE] = ENDED
    elif done:
        column[Column.START] = start = stop
        column[Column.OPEN] = min(column[Column.BLOCK], column[Column.LENGTH] - stop)
        column[Column.BEFORE] = 0 if stop % column[Column.SPAN] else column[Column.SPAN]
        if column[Column.BEFORE] or column[Column.SPAN] == CANVAS_LONG:
            column[Column.NUMBER] = 0
        column[Column.SINCE] = column[Column.SAVED] = 0
        if column[Column.DECIDES] == ALL_ONES:
            column[Column.QUOTA] = 1
    if column[Column.NUMBER] < column[Column.SCHEDULE]:
        entry = int(tokens[column[Column.LENGTH] + column[Column.NUMBER]])
        column[Column.STEP], column[Column.QUOTA] = entry >> 32, entry & 0xFFFFFFFF
    waits = column[Column.SHIFTED] and column[Column.OPEN] and tokens[start] == OPEN
    column[Column.WIDE] = column[Column.WINDOW] == WHOLE or column[Column.NUMBER] == 0 or waits
    if column[Column.WINDOW] == PACKED:
        column[Column.WIDE] = widens(column[None])[0]
    line[Reported.WRITTEN :] = column[Column.WRITTEN :]


def reference(
    *, table: Tensor, canvas: Tensor, row: Tensor, begin: Tensor, cu_seqlens: Tensor, cu_rows: Tensor, mask_id: int
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
        tokens = canvas[own[Column.CANVAS] :].tolist()
        closes = own[Column.SHIFTED] == 1 and own[Column.BEFORE] > 0
        line = [request, int(begin[i]), length, own[Column.START] - own[Column.BEFORE] * closes]
        places = range(own[Column.START], own[Column.START] + own[Column.BLOCK])
        left = sum(tokens[place] == OPEN for place in places)
        edits, done = own[Column.DECIDES] == 4, left == 0
        if own[Column.WRITTEN] < own[Column.PREFIX]:
            own[Column.WRITTEN] += length
        else:
            own[Column.STEP], own[Column.BEFORE] = own[Column.STEP] + 1, 0
            if own[Column.WINDOW] == PACKED and own[Column.WIDE] and not _marked(own, own[Column.NUMBER] + 1):
                low = own[Column.START] - (own[Column.START] - own[Column.PROMPT]) % own[Column.RENEWED]
                own[Column.WRITTEN] = min(low + own[Column.RENEWED], own[Column.LENGTH])
            own[Column.NUMBER] += 0 if closes else 1
            done = _edited(own, [(place, tokens[place]) for place in places], mask_id) if edits else done
        own[Column.OPEN] = left
        end, stop = own[Column.END], places.stop
        final = next((p for p in range(places.start, min(stop, end)) if tokens[p] == OPEN), min(stop, end))
        final = max(places.start, own[Column.PROMPT]) if edits and not done else final
        masked = sum(token == OPEN for token in tokens[places.start : end])
        stops = own[Column.STOP : Column.STOP + STOPS]
        found = [
            p for p in range(max(places.start, own[Column.PROMPT]), final) if tokens[p] in stops and tokens[p] >= 0
        ]
        ended = EOS if found else LENGTH if final == end else 0
        if ended:
            own[Column.STATE] = ENDED
        elif done:
            span = own[Column.SPAN]
            own[Column.START], own[Column.BEFORE] = stop, span if stop // span * span == stop else 0
            if stop // span * span == stop or span == CANVAS_LONG:
                own[Column.NUMBER] = 0
            own[Column.OPEN] = min(own[Column.BLOCK], own[Column.LENGTH] - stop)
            own[Column.SINCE], own[Column.SAVED] = 0, 0
            own[Column.QUOTA] = 1 if edits else own[Column.QUOTA]
        if own[Column.NUMBER] < own[Column.SCHEDULE]:
            own[Column.STEP], own[Column.QUOTA] = divmod(tokens[own[Column.LENGTH] + own[Column.NUMBER]], 2**32)
        undecided = own[Column.SHIFTED] == 1 and own[Column.OPEN] > 0 and tokens[own[Column.START]] == OPEN
        own[Column.WIDE] = int(own[Column.WINDOW] == WHOLE or own[Column.NUMBER] == 0 or undecided)
        if own[Column.WINDOW] == PACKED:
            own[Column.WIDE] = int(own[Column.START] >= own[Column.WRITTEN] and _marked(own, own[Column.NUMBER]))
        state = [found[0] + 1 if found else final, masked, ended, int(cu_rows[i + 1])]
        report[i] = torch.tensor([*line, *state, *own[Column.WRITTEN :]])
        after[request] = torch.tensor(own)
    return {"table": after, "report": report}


def _marked(own: list[int], number: int) -> int:
    return own[Column.MARKS] >> min(number, 62) & 1


def _edited(own: list[int], block: Sequence[tuple[int, int]], mask_id: int) -> bool:
    """Note how the block of a request stands that is edited, positions and tokens given; return whether it is done."""
    left = sum(token == OPEN for _, token in block)
    own[Column.SINCE] = own[Column.SINCE] + 1 if left == own[Column.OPEN] else 0
    now = sum(reference_mixed(token ^ reference_mixed(place)) for place, token in block)
    now = (now + 2**63) % 2**64 - 2**63
    again = now == own[Column.SAVED]
    if left == 0 or own[Column.SINCE] in [0, *(2**n for n in range(40))]:
        own[Column.SAVED] = now
    own[Column.QUOTA] = 1 + (sum(token == mask_id for _, token in block) if again else 0)
    return left == 0 and (own[Column.SINCE] >= own[Column.POST_STEPS] or (again and own[Column.SINCE] > 0))
