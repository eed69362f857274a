"""pack_keys on CUDA: the chosen keys and values of each sequence into its rows of a state, side by side, per head.

A program copies the keys and values of one head of some rows. Bounds are read on the device alone. kv overlaps no other operand.
Legend: T rows, R rows of the state, L layers, B sequences, K KV heads, H size.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import power_of_two, tl, triton
from mosaic.kernels.cuda.shared.sequences import SEQUENCES, first_sequence

# Untuned defaults.
ROWS: Final = 32
"""Rows of a program."""
WARPS: Final = 4


@triton.jit(do_not_specialize=["layer", "column_of_layer", "row_start", "sequences"])
def pack_keys_kernel(
    k,
    v,
    chosen,
    spans,
    cu_seqlens,
    extents,
    kv,
    held,
    held_row,
    k_stride,
    v_stride,
    chosen_stride,
    kv_stride,
    held_stride,
    layer,
    column_of_layer,
    row_start,
    sequences,
    SEQUENCES: tl.constexpr,
    HELD: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK_H)
    from_ = head * SIZE + column[None, :]
    sequence = first_sequence(tl.program_id(0) * BLOCK, cu_seqlens, sequences, SEQUENCES)
    start = tl.load(cu_seqlens + sequence)
    until = tl.minimum((tl.program_id(0) + 1) * BLOCK, tl.load(cu_seqlens + sequences))
    while start < until:
        end = tl.load(cu_seqlens + sequence + 1)
        span = tl.load(spans + 5 * sequence + 3) - tl.load(spans + 5 * sequence + 2)
        kept = tl.load(spans + 5 * sequence + 4)
        first = 0
        own = kept
        if HELD:  # of `own` keys the first goes to the row `first`
            bounds = held + tl.load(held_row + sequence) * held_stride + column_of_layer + 2 * head
            first = tl.load(bounds)
            own = tl.load(bounds + 1) - first
        count = own + span
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) - start
        mine = (row >= 0) & (row < count) & (start < end)
        taken = tl.load(chosen + head.to(tl.int64) * chosen_stride + start + row, mask=mine, other=0).to(tl.int64)
        mask = mine[:, None] & (column < SIZE)[None, :]
        keys = tl.load(k + taken[:, None] * k_stride + from_, mask=mask)
        values = tl.load(v + taken[:, None] * v_stride + from_, mask=mask)
        rows = tl.load(extents + 4 * sequence + 1)
        to = kv + tl.load(extents + 4 * sequence) * kv_stride + (2 * layer * HEADS + row_start + head) * SIZE * rows
        place = to + tl.where(row < own, first + row, kept + row - own)[:, None] * SIZE + column[None, :]
        tl.store(place, keys.to(kv.dtype.element_ty), mask=mask)
        tl.store(place + HEADS * SIZE * rows, values.to(kv.dtype.element_ty), mask=mask)
        sequence += 1
        start = end


def launch(
    *, k: Tensor, v: Tensor, chosen: Tensor, spans: Tensor, cu_seqlens: Tensor, extents: Tensor, kv: Tensor, layer: int,
    kv_heads: int, head_size: int, held: Tensor | None = None, held_row: Tensor | None = None, slot: int = 0,
    row_start: int = 0, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Update kv."""
    heads, sequences = k.shape[1] // head_size, spans.shape[0]
    pack_keys_kernel[(triton.cdiv(k.shape[0], ROWS), heads)](
        k,
        v,
        chosen,
        spans,
        cu_seqlens,
        extents,
        kv,
        spans if held is None else held,
        spans if held_row is None else held_row,
        k.stride(0),
        v.stride(0),
        chosen.stride(0) if chosen.shape[0] == heads else 0,
        kv.stride(0),
        0 if held is None else held.stride(0),
        layer,
        2 * slot * kv_heads,
        row_start,
        sequences,
        SEQUENCES=power_of_two(sequences, 1 << 16, least=SEQUENCES),
        HELD=held is not None,
        HEADS=kv_heads,
        SIZE=head_size,
        BLOCK=ROWS,
        BLOCK_H=power_of_two(head_size, 1 << 16),
        num_warps=WARPS,
    )
