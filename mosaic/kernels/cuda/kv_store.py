"""kv_store on CUDA: keys and values of a window of tokens into the rows that they own, in one launch.

Contract: kv_store(k[T, W] sliced, v[T, W] sliced, slots[T] int64, kv[R, L*2*W] whole; layer): kv[slots] = (k, v) in the
layer's columns, its keys first. Slots are distinct; a row whose slot lies outside kv is not kept: a kernel cannot raise,
and padding has slot -1. kv overlaps no other operand. Legend: T tokens, R rows, L layers, W width of keys.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import power_of_two, tl, triton
from mosaic.kernels.kv_store import check, reference

__all__ = ["launch", "reference"]

# Untuned defaults: 8 elements of k and of v a thread.
COLUMNS: Final = 1024
WARPS: Final = 4


@triton.jit(do_not_specialize=["rows"])
def kv_store_kernel(k, v, slots, kv, k_stride, v_stride, kv_stride, rows, first, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    mask = (column < width) & (slot >= 0) & (slot < rows)
    keys = tl.load(k + row * k_stride + column, mask=mask)
    values = tl.load(v + row * v_stride + column, mask=mask)
    place = kv + slot * kv_stride + first + column
    tl.store(place, keys, mask=mask)
    tl.store(place + width, values, mask=mask)


def launch(*, k: Tensor, v: Tensor, slots: Tensor, kv: Tensor, layer: int, scratch: Tensor | None = None) -> None:
    """Update kv."""
    first = check(k, v, slots, kv, layer)
    tokens, width = k.shape
    block = power_of_two(width, COLUMNS)
    kv_store_kernel[(tokens, triton.cdiv(width, block))](
        k,
        v,
        slots,
        kv,
        k.stride(0),
        v.stride(0),
        kv.stride(0),
        kv.shape[0],
        first,
        width,
        BLOCK=block,
        num_warps=WARPS,
    )
