"""packed_attention on CUDA: softmax(q k^T * scale) v per sequence, over its own keys and the packed keys of other parts.

A program owns a tile of one sequence's rows and a query head: online softmax in float32 over tiles of packed keys, then over tiles
of own keys. Bounds are read on the device alone. kv overlaps no other operand. Legend: T rows, B sequences, N query heads, H size.
"""

import math

from torch import Tensor

from mosaic.kernels.cuda.attention import NARROW, TILES, WIDEST
from mosaic.kernels.cuda.shared.launching import DOT_MINIMUM, power_of_two, since, tile_for, tl, triton


@triton.jit
def attended(queries, k, v, visible, maximum, total, accumulator, scale_log2):
    """Take a tile of keys and values into the running maximum, sum and output of some rows."""
    scores = tl.dot(queries, k, input_precision="ieee") * scale_log2
    scores = tl.where(visible[None, :], scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    weights = tl.exp2(scores - new_maximum[:, None])
    correction = tl.exp2(maximum - new_maximum)
    total = total * correction + tl.sum(weights, 1)
    accumulator = tl.dot(weights.to(v.dtype), v, accumulator * correction[:, None], input_precision="ieee")
    return new_maximum, total, accumulator


@triton.jit(do_not_specialize=["layer", "column_of_layer"])
def packed_attention_kernel(
    q,
    k,
    v,
    kv,
    extents,
    held,
    held_row,
    spans,
    cu_seqlens,
    y,
    q_stride,
    k_stride,
    v_stride,
    kv_stride,
    held_stride,
    y_stride,
    layer,
    column_of_layer,
    scale_log2,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    start = tl.load(cu_seqlens + sequence).to(tl.int64)
    end = tl.load(cu_seqlens + sequence + 1).to(tl.int64)
    row = start + tl.program_id(0).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    if start + tl.program_id(0).to(tl.int64) * BLOCK_Q < end:
        column = tl.arange(0, BLOCK_H)
        within = column < SIZE
        shared = head // GROUP
        bounds = held + tl.load(held_row + sequence) * held_stride + column_of_layer + 2 * shared
        first = tl.load(bounds)
        older = tl.load(bounds + 1) - first
        packed = tl.load(spans + 5 * sequence + 4) - older
        rows = tl.load(extents + 4 * sequence + 1)
        k_packed = kv + tl.load(extents + 4 * sequence) * kv_stride + (2 * layer * HEADS + shared) * SIZE * rows
        v_packed = k_packed + HEADS * SIZE * rows

        mask = (row < end)[:, None] & within[None, :]
        queries = tl.load(q + row[:, None] * q_stride + head * SIZE + column[None, :], mask=mask, other=0.0)
        maximum = tl.full([BLOCK_Q], -3.0e38, tl.float32)
        total = tl.zeros([BLOCK_Q], tl.float32)
        accumulator = tl.zeros([BLOCK_Q, BLOCK_H], tl.float32)
        key = tl.arange(0, BLOCK_K)
        for some in range(0, packed, BLOCK_K):
            visible = some + key < packed
            place = some + key + tl.where(some + key < first, 0, older)
            k_place = k_packed + place.to(tl.int64)[None, :] * SIZE + column[:, None]
            v_place = v_packed + place.to(tl.int64)[:, None] * SIZE + column[None, :]
            k_tile = tl.load(k_place, mask=visible[None, :] & within[:, None], other=0.0).to(queries.dtype)
            v_tile = tl.load(v_place, mask=visible[:, None] & within[None, :], other=0.0).to(queries.dtype)
            maximum, total, accumulator = attended(
                queries, k_tile, v_tile, visible, maximum, total, accumulator, scale_log2
            )
        for some in range(start, end, BLOCK_K):
            visible = some + key < end
            k_place = k + (some + key)[None, :] * k_stride + shared * SIZE + column[:, None]
            v_place = v + (some + key)[:, None] * v_stride + shared * SIZE + column[None, :]
            k_tile = tl.load(k_place, mask=visible[None, :] & within[:, None], other=0.0)
            v_tile = tl.load(v_place, mask=visible[:, None] & within[None, :], other=0.0)
            maximum, total, accumulator = attended(
                queries, k_tile, v_tile, visible, maximum, total, accumulator, scale_log2
            )
        # y may be q: this program alone reads these rows of this head, and has read them
        result = (accumulator / total[:, None]).to(y.dtype.element_ty)
        tl.store(y + row[:, None] * y_stride + head * SIZE + column[None, :], result, mask=mask)


def launch(
    *, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, extents: Tensor, held: Tensor, held_row: Tensor, spans: Tensor,
    cu_seqlens: Tensor, y: Tensor, layer: int, slot: int, kv_heads: int, head_size: int, scale: float, span: int = 0,
    keys: int = 0, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the attention of the query rows into y [T, N*H]; y may be q itself."""
    heads = q.shape[1] // head_size
    tile = tile_for(since(TILES, q) if head_size <= WIDEST else NARROW, q)
    packed_attention_kernel[(triton.cdiv(q.shape[0], tile.rows), heads, spans.shape[0])](
        q,
        k,
        v,
        kv,
        extents,
        held,
        held_row,
        spans,
        cu_seqlens,
        y,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        kv.stride(0),
        held.stride(0),
        y.stride(0),
        layer,
        2 * slot * kv_heads,
        scale / math.log(2),
        GROUP=heads // kv_heads,
        HEADS=kv_heads,
        SIZE=head_size,
        BLOCK_Q=tile.rows,
        BLOCK_K=tile.columns,
        BLOCK_H=power_of_two(head_size, 1 << 16, least=DOT_MINIMUM),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
