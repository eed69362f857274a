"""shift_rows: the row whose logits predict row i, in models trained with a shift (Dream): i - 1, within its sequence.

Moving indices instead of copying shifted logits. Legend: M rows, B sequences.
"""

import torch
from torch import Tensor

from mosaic.kernels.shared.scratch import tiles_of


def launch(*, rows: Tensor, cu_seqlens: Tensor, y: Tensor, scratch: Tensor | None = None) -> None:
    """Write the shifted rows into y [M]."""
    one, bounds, sequence, first = tiles_of("shift_rows", scratch, {"rows": rows, "cu_seqlens": cu_seqlens})
    one.fill_(1)
    bounds.copy_(cu_seqlens)  # searchsorted converts an int32 table in fresh memory
    # side right: bounds[i - 1] <= row < bounds[i]; empty sequences are stepped over
    torch.searchsorted(bounds, rows, right=True, out=sequence)
    sequence.sub_(one)
    torch.index_select(bounds, 0, sequence, out=first)
    torch.sub(rows, one, out=y)
    torch.maximum(y, first, out=y)


def reference(*, rows: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the shifted rows, one at a time."""
    bounds = cu_seqlens.tolist()
    first_of = [max(bound for bound in bounds if bound <= row) for row in rows.tolist()]
    return torch.tensor(
        [max(row - 1, first) for row, first in zip(rows.tolist(), first_of, strict=True)], dtype=torch.int64
    )
