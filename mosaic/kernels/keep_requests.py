"""keep_requests: what the requests that a step serves keep of their keys, and where it lies.

Outputs overlap no operand. Legend: S requests, B windows, E extents.
"""

import numpy as np
import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.requests import packed_spans
from mosaic.registrar.request_table import Column


def bind(
    *, table: Tensor, row: Tensor, seen: Tensor, cu_seqlens: Tensor, extents: Tensor, cu_extents: Tensor, spans: Tensor,
    packed_extents: Tensor, cu_whole: Tensor, own_extents: Tensor, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write all outputs."""
    columns, requests, keys = table.numpy(), row.numpy(), seen.numpy()
    tokens, held, of_windows = cu_seqlens.numpy(), extents.numpy(), cu_extents.numpy()
    outputs = of_spans, packed, bounds, own = [each.numpy() for each in (spans, packed_extents, cu_whole, own_extents)]

    def run() -> None:
        for values in outputs:
            values.fill(0)
        count = int((requests >= 0).sum())
        mine, whole = columns[requests[:count]], int((keys[:count] == 0).sum())
        (low, high, kept), start = packed_spans(mine), mine[:, Column.START]
        of_spans[:whole] = np.stack([start, start + mine[:, Column.BLOCK], low, high, kept], axis=1)[:whole]
        packed[:whole] = held[of_windows[:whole]]
        np.minimum(tokens[1:], tokens[whole], out=bounds[1:-1])
        bounds[-1] = tokens[whole]
        first, last = of_windows[whole], of_windows[count]
        own[first:last] = held[first:last]
        own[first:last, 2] += np.repeat(low - kept, np.diff(of_windows[: count + 1]))[first:]

    return run


launch = launcher(bind)


def reference(
    *, table: Tensor, row: Tensor, seen: Tensor, cu_seqlens: Tensor, extents: Tensor, cu_extents: Tensor
) -> dict[str, Tensor]:
    """Return all outputs, a window at a time, in plain Python."""
    spans, packed = ([[0] * width for _ in range(len(row) + 1)] for width in (5, 4))
    bounds, own = [0], [[0] * 4 for _ in range(len(extents))]
    for i, request in enumerate(row.tolist()):
        bounds.append(bounds[-1])
        if request < 0:
            continue
        line, mine = table[request].tolist(), range(int(cu_extents[i]), int(cu_extents[i + 1]))
        start, width = line[Column.START], line[Column.RENEWED]
        low = start - (start - line[Column.PROMPT]) % width
        kept, high = line[Column.KEPT], low + width
        if high > line[Column.LENGTH]:
            kept, high = line[Column.KEPT_LAST], line[Column.LENGTH]
        if seen[i] == 0:
            spans[i], packed[i] = [start, start + line[Column.BLOCK], low, high, kept], extents[mine[0]].tolist()
            bounds[-1] = int(cu_seqlens[i + 1])
            continue
        for extent in mine:
            first, rows, position, before = extents[extent].tolist()
            own[extent] = [first, rows, position + low - kept, before]
    return {
        "spans": torch.tensor(spans, dtype=torch.int32), "packed_extents": torch.tensor(packed),
        "cu_whole": torch.tensor([*bounds, bounds[-1]], dtype=torch.int32), "own_extents": torch.tensor(own),
    }  # fmt: skip
