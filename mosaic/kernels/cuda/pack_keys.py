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


@triton.jit(do_not_specialize=["layer", "row_start", "sequences"])
def pack_keys_kernel(
    k,
    v,
    chosen,
    spans,
    cu_seqlens,
    extents,
    kv,
    k_stride,
    v_stride,
    chosen_stride,
    kv_stride,
    layer,
    row_start,
    sequences,
    SEQUENCES: tl.constexpr,
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
        count = tl.load(spans + 5 * sequence + 4) + span
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) - start
        mine = (row >= 0) & (row < count) & (start < end)
        taken = tl.load(chosen + head.to(tl.int64) * chosen_stride + start + row, mask=mine, other=0).to(tl.int64)
        mask = mine[:, None] & (column < SIZE)[None, :]
        keys = tl.load(k + taken[:, None] * k_stride + from_, mask=mask)
        values = tl.load(v + taken[:, None] * v_stride + from_, mask=mask)
        rows = tl.load(extents + 4 * sequence + 1)
        to = kv + tl.load(extents + 4 * sequence) * kv_stride + (2 * layer * HEADS + row_start + head) * SIZE * rows
        place = to + row[:, None] * SIZE + column[None, :]
        tl.store(place, keys.to(kv.dtype.element_ty), mask=mask)
        tl.store(place + HEADS * SIZE * rows, values.to(kv.dtype.element_ty), mask=mask)
        sequence += 1
        start = end


def launch(
    *, k: Tensor, v: Tensor, chosen: Tensor, spans: Tensor, cu_seqlens: Tensor, extents: Tensor, kv: Tensor, layer: int,
    kv_heads: int, head_size: int, row_start: int = 0, scratch: Tensor | None = None,
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
        k.stride(0),
        v.stride(0),
        chosen.stride(0) if chosen.shape[0] == heads else 0,
        kv.stride(0),
        layer,
        row_start,
        sequences,
        SEQUENCES=power_of_two(sequences, 1 << 16, least=SEQUENCES),
        HEADS=kv_heads,
        SIZE=head_size,
        BLOCK=ROWS,
        BLOCK_H=power_of_two(head_size, 1 << 16),
        num_warps=WARPS,
    )
