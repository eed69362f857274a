"""reuse_requests: what the requests that a step serves reuse of attention to their prefixes, and which of them refresh it.

Outputs overlap no operand. Legend: S requests, B windows.
"""

import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.registrar.request_table import Column


def bind(
    *, table: Tensor, row: Tensor, kept_row: Tensor, prefix: Tensor, refreshed: Tensor, own: int, steps: int = 0,
    scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write all outputs."""
    columns, requests = table.numpy(), row.numpy()
    outputs = kept, prefixes, again = [each.numpy() for each in (kept_row, prefix, refreshed)]

    def run() -> None:
        for values in outputs:
            values.fill(0)
        count = int((requests >= 0).sum())
        column = columns[requests[:count]].T
        number = column[Column.NUMBER]
        kept[:count], prefixes[:count] = column[own], column[Column.START]
        again[:count] = column[Column.START] * ((number % steps if steps else number) == 0)

    return run


launch = launcher(bind)


def reference(*, table: Tensor, row: Tensor, own: int, steps: int = 0) -> dict[str, Tensor]:
    """Return all outputs, a window at a time, in plain Python."""
    kept, prefix, refreshed = ([0] * len(row) for _ in range(3))
    for i, request in enumerate(row.tolist()):
        if request < 0:
            break
        line = table[request].tolist()
        kept[i], prefix[i] = line[own], line[Column.START]
        if line[Column.NUMBER] == 0 or (steps and line[Column.NUMBER] % steps == 0):
            refreshed[i] = prefix[i]
    return {
        "kept_row": torch.tensor(kept), "prefix": torch.tensor(prefix, dtype=torch.int32),
        "refreshed": torch.tensor(refreshed, dtype=torch.int32),
    }  # fmt: skip
