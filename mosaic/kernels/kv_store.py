"""kv_store: keys and values of a window of tokens into the rows that they own.

Contract: kv_store(k[T, W] sliced, v[T, W] sliced, slots[T] int64, kv[R, L*2*W] whole; layer): kv[slots] = (k, v) in the
layer's columns, its keys first. Slots are distinct; a row whose slot is negative (padding) is not kept. kv overlaps no
other operand. Legend: T tokens, R rows, L layers, W width of keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.operands import INDEX, check_kv_row, check_shapes

__all__ = ["bind", "check", "launch", "reference"]


def bind(*, k: Tensor, v: Tensor, slots: Tensor, kv: Tensor, layer: int, scratch: Tensor | None = None) -> Run:
    """Update kv; `slots` is read on the host, and neighbours that stay neighbours are copied at once."""
    first, width = check(k, v, slots, kv, layer), k.shape[1]
    columns = [(kv[:, at : at + width], x) for at, x in ((first, k), (first + width, v))]

    def run() -> None:
        rows: list[int] = slots.tolist()
        start = 0
        while start < len(rows):
            end = start + 1
            while end < len(rows) and rows[end] == rows[end - 1] + 1 and rows[start] >= 0:
                end += 1
            if rows[start] >= 0:
                if rows[end - 1] >= kv.shape[0]:
                    raise IndexError(f"kv_store: slot {rows[end - 1]:,} of {kv.shape[0]:,} rows")
                for kept, x in columns:
                    kept[rows[start] : rows[start] + end - start].copy_(x[start:end])
            start = end

    return run


launch = launcher(bind)


def check(k: Tensor, v: Tensor, slots: Tensor, kv: Tensor, layer: int) -> int:
    """Check the operands; return the layer's first column."""
    tokens, width = k.shape
    check_shapes(
        "kv_store",
        k=(k, (tokens, width), None),
        v=(v, (tokens, width), k.dtype),
        slots=(slots, (tokens,), INDEX[0]),
        kv=(kv, (kv.shape[0], kv.shape[-1]), k.dtype),
    )
    return check_kv_row("kv_store", kv, width, layer)


def reference(*, k: Tensor, v: Tensor, slots: Tensor, kv: Tensor, layer: int) -> Tensor:
    """Return kv after the update, in plain PyTorch."""
    width, kept = k.shape[1], slots >= 0
    after = kv.clone()
    after[slots[kept], 2 * layer * width : 2 * (layer + 1) * width] = torch.cat([k, v], dim=1)[kept]
    return after
