"""draw_requests: random keys and sampling settings of the rows to decide of a table's requests.

Outputs overlap no operand. Legend: M rows, B windows.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.requests import closes, floats, keys_of
from mosaic.registrar.request_table import Column


def bind(
    *, table: Tensor, row: Tensor, cu_rows: Tensor, decided_rows: Tensor, keys: Tensor, temperature: Tensor, top_p:
    Tensor, top_k: Tensor, cuts: Tensor, score_temperature: Tensor, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write all outputs."""
    columns, requests, bounds = table.numpy(), row.numpy(), cu_rows.numpy()
    given = keys, temperature, top_p, top_k, cuts, score_temperature
    rows, outputs = decided_rows.numpy(), [each.numpy() for each in given]

    def run() -> None:
        for values, nothing in zip(outputs, _NOTHING, strict=True):
            values.fill(nothing)
        for request, (start, end) in zip(requests.tolist(), pairwise(bounds.tolist()), strict=True):
            if request < 0:
                return
            column = columns[request]
            outputs[0][start:end] = keys_of(column, rows[start:end])
            if closes(columns[request : request + 1])[0]:
                continue
            warmth, nucleus, of_scores = (floats(column[name]) for name in _FLOATS)
            settings = warmth, nucleus, column[Column.TOP_K], column[Column.CUTS], of_scores
            for values, value in zip(outputs[1:], settings, strict=True):
                values[start:end] = value

    return run


launch = launcher(bind)
_NOTHING = (0, 0, 1, 0, 0, 0)
_FLOATS = (Column.TEMPERATURE, Column.TOP_P, Column.SCORE_TEMPERATURE)
_WORD = 2**64 - 1


def reference(*, table: Tensor, row: Tensor, cu_rows: Tensor, decided_rows: Tensor) -> dict[str, Tensor]:
    """Return all outputs, a row at a time, in plain Python."""
    count = len(decided_rows)
    keys, top_k, cuts = ([0] * count for _ in range(3))
    temperature, top_p, of_scores = [0.0] * count, [1.0] * count, [0.0] * count
    for request, (start, end) in zip(row.tolist(), pairwise(cu_rows.tolist()), strict=True):
        for m in range(start, end):
            own = table[request].tolist()
            keys[m] = reference_key(own, int(decided_rows[m]) - own[Column.CANVAS])
            if own[Column.SHIFTED] and own[Column.BEFORE]:
                continue
            top_k[m], cuts[m] = own[Column.TOP_K], own[Column.CUTS]
            temperature[m], top_p[m], of_scores[m] = (float(floats(own[name])) for name in _FLOATS)
    return {
        "keys": torch.tensor(keys), "temperature": torch.tensor(temperature), "top_p": torch.tensor(top_p),
        "top_k": torch.tensor(top_k, dtype=torch.int32), "cuts": torch.tensor(cuts, dtype=torch.uint8),
        "score_temperature": torch.tensor(of_scores),
    }  # fmt: skip


def reference_key(own: Sequence[int], position: int) -> int:
    """Return the random key of a position of a request, whose columns these are, in its next step."""
    key = reference_mixed(reference_mixed(own[Column.NOISE] ^ own[Column.STEP]) ^ position)
    return key - (key >> 63 << 64)


def reference_mixed(word: int) -> int:
    """Return the finaliser of splitmix64, of a number modulo 2^64."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31
