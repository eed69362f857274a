"""place_requests: where the tokens, rows to decide and keys of the requests that a step serves lie.

Outputs overlap no operand. Legend: T tokens, M rows, E extents, B windows.
"""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from mosaic.kernels.draw_requests import reference_key
from mosaic.kernels.shared import sampling
from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.requests import alone, floats, keys_of, quotas, uniforms
from mosaic.registrar.operators.read_canvas import OPEN
from mosaic.registrar.request_table import ALL_ONES, LEAST_ONES, RANDOM_ONES, Column


def bind(
    *, table: Tensor, canvas: Tensor, held_extents: Tensor, row: Tensor, begin: Tensor, cu_seqlens: Tensor, cu_rows:
    Tensor, cu_extents: Tensor, positions: Tensor, token_rows: Tensor, rows: Tensor, decided_rows: Tensor, extents:
    Tensor, quota: Tensor, threshold: Tensor, edit_threshold: Tensor, tokens: int = 0, most: int = 0, count: int = 0,
    scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write all outputs."""
    columns, kept, held = table.numpy(), canvas.numpy(), held_extents.numpy()
    requests, begins, bounds = row.numpy(), begin.numpy(), [each.numpy() for each in (cu_seqlens, cu_rows, cu_extents)]
    given = (positions, token_rows, rows, decided_rows, extents, quota, threshold, edit_threshold)
    outputs = [each.numpy() for each in given]
    places, canvas_rows, numbers, decided, of_keys, least, limits, edits = outputs

    def run() -> None:
        for values, nothing in zip(outputs, _NOTHING, strict=True):
            values.fill(nothing)
        ends = zip(*(pairwise(bound.tolist()) for bound in bounds), strict=True)
        for i, (request, first, of_each) in enumerate(zip(requests.tolist(), begins.tolist(), ends, strict=True)):
            if request < 0:
                return
            (start, end), (from_row, to_row), (from_extent, to_extent) = of_each
            column = columns[request]
            places[start:end] = np.arange(first, first + end - start)
            canvas_rows[start:end] = column[Column.CANVAS] + places[start:end]
            if to_row > from_row:
                block, decides = column[Column.CANVAS] + column[Column.START], column[Column.DECIDES]
                there = (kept[block : block + column[Column.BLOCK]] == OPEN).nonzero()[0]
                if decides == ALL_ONES:
                    there = np.arange(max(column[Column.PROMPT] - column[Column.START], 0), column[Column.BLOCK])
                elif decides in (RANDOM_ONES, LEAST_ONES) and not alone(columns[request : request + 1])[0]:
                    chances = uniforms(keys_of(column, block + there))
                    there = there[np.argsort(chances if decides == LEAST_ONES else -chances, kind="stable")]
                there = np.sort(there[: to_row - from_row])
                decided[from_row:to_row] = block + there
                numbers[from_row:to_row] = column[Column.START] + there + (start - first - column[Column.SHIFTED])
            of_keys[from_extent:to_extent] = held[column[Column.EXTENT] :][: to_extent - from_extent]
            least[i], limits[i] = quotas(columns[request : request + 1])[0], floats(column[Column.THRESHOLD])
            edits[i] = floats(column[Column.EDIT_THRESHOLD])

    return run


launch = launcher(bind)
_NOTHING = (0, -1, 0, -1, 0, 0, 0, 0)


def reference(
    *, table: Tensor, canvas: Tensor, held_extents: Tensor, row: Tensor, begin: Tensor,
    cu_seqlens: Tensor, cu_rows: Tensor, cu_extents: Tensor, tokens: int, most: int, count: int,
) -> dict[str, Tensor]:  # fmt: skip
    """Return all outputs, a token at a time, in plain Python."""
    places, canvas_rows, numbers, decided, of_keys = (
        list[int](),
        list[int](),
        list[int](),
        list[int](),
        list[list[int]](),
    )
    least, limits, edits = [0] * len(row), [0.0] * len(row), [0.0] * len(row)
    for i, request in enumerate(row.tolist()):
        if request < 0:
            break
        own, first, at = table[request].tolist(), int(begin[i]), len(places)
        for position in range(first, first + int(cu_seqlens[i + 1] - cu_seqlens[i])):
            places.append(position)
            canvas_rows.append(own[Column.CANVAS] + position)
        block = range(own[Column.START], own[Column.START] + own[Column.BLOCK])
        wanted = int(cu_rows[i + 1] - cu_rows[i])
        open_ = [place for place in block if wanted and int(canvas[own[Column.CANVAS] + place]) == OPEN]
        in_canvas = own[Column.SPAN] > own[Column.LENGTH] and own[Column.WINDOW] != 3 and own[Column.NUMBER] == 0
        if own[Column.DECIDES] == 4:
            open_ = [place for place in block if wanted and place >= own[Column.PROMPT]]
        if own[Column.DECIDES] in (2, 3) and not (own[Column.SHIFTED] and (own[Column.BEFORE] > 0 or in_canvas)):
            keys, sign = [reference_key(own, place) for place in open_], 2 * own[Column.DECIDES] - 5
            chances = dict(zip(open_, sampling.uniforms(torch.tensor(keys, dtype=torch.int64)).tolist(), strict=True))
            open_.sort(key=lambda place: (sign * chances[place], place))
        for position in sorted(open_[:wanted]):
            decided.append(own[Column.CANVAS] + position)
            numbers.append(at + position - first - own[Column.SHIFTED])
        of_keys += held_extents[own[Column.EXTENT] : own[Column.EXTENT] + own[Column.EXTENTS]].tolist()
        least[i] = own[Column.QUOTA] + (1 if own[Column.NUMBER] < own[Column.MORE] else 0)
        limits[i], edits[i] = float(floats(own[Column.THRESHOLD])), float(floats(own[Column.EDIT_THRESHOLD]))
    return {
        "positions": torch.tensor(places + [0] * (tokens - len(places)), dtype=torch.int32),
        "token_rows": torch.tensor(canvas_rows + [-1] * (tokens - len(places))),
        "rows": torch.tensor(numbers + [0] * (most - len(numbers))),
        "decided_rows": torch.tensor(decided + [-1] * (most - len(decided))),
        "extents": torch.tensor(of_keys + [[0] * 4] * (count - len(of_keys)), dtype=torch.int64),
        "quota": torch.tensor(least, dtype=torch.int32),
        "threshold": torch.tensor(limits),
        "edit_threshold": torch.tensor(edits),
    }
