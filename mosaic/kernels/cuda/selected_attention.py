"""selected_attention on CUDA: softmax(q k^T * scale) v per sequence, over selected keys of a prefix and all keys after it.

Contract: selected_attention(q[T, N*H] sliced, kv[R, L*2*K*H] whole, extents[X, 4] int64 whole, cu_extents[B+1] int32 whole,
selected[E, W] int32 whole, owner[B] int64 whole, captured[B] int32 whole, seen[B] int32 whole, cu_seqlens[B+1] int32 whole,
positions[T] int32 sliced; layer, slot, sets, k, page, kv_heads, head_size, scale, attended, block) -> y[T, N*H], as
`mosaic.registrar.operators.selected_attention` says (MAGE, Algorithm 1); y may overwrite q. Row r of q is row `row_start + r` of
the packed window. A row in no sequence, or that sees no key, is left as it was.

A tile's rows are tokens of one sequence times the query heads of one set. Its keys are one list in order of position: the selected
ones, then those from the end of the prefix on. The keys of one extent lie side by side in the list, and are read one by one. As in
`kv_attention`, few tiles are split over their keys, and a second launch joins the partial results from scratch. Lengths and counts
are read on the device alone: how many programs start depends on shapes, so a captured launch serves others. Legend: T query rows,
R rows of the state, L layers, B sequences, X extents, E rows of selections, N query heads, K KV heads, H head size.
"""

from __future__ import annotations

import math
from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.kv_attention import SEQUENCES, cut_of, find_tile, join, partials_of, share_of
from mosaic.kernels.cuda.shared.launching import DOT_MINIMUM, power_of_two, processors, tl, triton
from mosaic.kernels.selected_attention import check, reference
from mosaic.registrar.operators.kv_attention import KV_SPLIT_KEYS, kv_splits

__all__ = ["launch", "reference"]

PLACES: Final = 2
"""Programs that a multiprocessor runs at a time."""


@triton.jit
def keys_before(end, listed, chosen, prefix, PAGE: tl.constexpr):
    """Count the keys of a list that lie before position `end`: it is ascending."""
    low = end * 0
    high = chosen // PAGE
    while low < high:
        middle = (low + high) // 2
        before = tl.load(listed + 1 + middle) * PAGE < end
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    # so many pages begin before it; the last of them may go beyond
    beyond = tl.maximum((tl.load(listed + low, mask=low > 0, other=-1) + 1) * PAGE - end, 0)
    return tl.where(end < prefix, low * PAGE - beyond, chosen + end - prefix)


@triton.jit(do_not_specialize=["rows", "row_start", "sequences", "splits", "partial_rows", "layer", "slot"])
def selected_attention_kernel(
    q,
    kv,
    extents,
    cu_extents,
    selected,
    owner,
    captured,
    seen,
    cu_seqlens,
    positions,
    y,
    partials,
    q_stride,
    kv_stride,
    selected_stride,
    y_stride,
    rows,
    row_start,
    sequences,
    splits,
    partial_rows,
    layer,
    slot,
    scale_log2,
    HEADS: tl.constexpr,
    SETS: tl.constexpr,
    GROUP: tl.constexpr,
    PART: tl.constexpr,
    SIZE: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    SEEN: tl.constexpr,
    SPLIT: tl.constexpr,
    SEQUENCES: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    PARTS: tl.constexpr = (GROUP + PART - 1) // PART
    TOKENS: tl.constexpr = BLOCK_Q // PART
    tile = tl.program_id(0)
    own = tl.program_id(1) // PARTS
    first, last, sequence = find_tile(tile, cu_seqlens, sequences, row_start, rows, TOKENS, SEQUENCES)
    index = tl.arange(0, BLOCK_Q)
    row = first + index // PART
    member = tl.program_id(1) % PARTS * PART + index % PART
    here = (index < TOKENS * PART) & (member < GROUP) & (row < last)
    # each row sees, of the keys in the list, those at positions [0, limit)
    limit = tl.where(here, tl.load(seen + sequence), 0)
    if SEEN:
        position = tl.load(positions + row, mask=here, other=0)
        limit = tl.minimum(limit, (position // SEEN + 1) * SEEN)
    most = tl.max(limit, 0)
    prefix = tl.load(captured + sequence)
    listed = selected + tl.load(owner + sequence) * selected_stride + (slot * SETS + own) * (PAGES + 1)
    chosen = tl.load(listed, mask=(prefix > 0) & (most > 0), other=0) * PAGE
    high = chosen + tl.maximum(most - prefix, 0)
    low = 0
    if SPLIT:
        share = share_of(high, splits, BLOCK_K, LEAST)
        low = tl.program_id(2) * share
        high = tl.minimum(high, low + share)

    column = tl.arange(0, BLOCK_H)
    place = row.to(tl.int64)[:, None] * q_stride + ((own * GROUP + member) * SIZE)[:, None] + column[None, :]
    mask = here[:, None] & (column < SIZE)[None, :]
    queries = tl.load(q + place, mask=mask, other=0.0)
    maximum = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    accumulator = tl.zeros([BLOCK_Q, BLOCK_H], tl.float32)
    last_extent = tl.load(cu_extents + sequence + 1)
    kv_head = own // (SETS // HEADS)
    done = low * 0  # keys of the list in the extents so far
    for extent in range(tl.load(cu_extents + sequence), last_extent):
        entry = extents + extent * 4
        count = tl.load(entry + 1)
        # where the key of position 0 would lie, were the extent to reach there
        origin = tl.load(entry + 3) - tl.load(entry + 2)
        k = kv + tl.load(entry) * kv_stride + ((2 * layer * HEADS + kv_head) * count + origin) * SIZE
        v = k + HEADS * count * SIZE
        stop = high
        if extent + 1 < last_extent:
            stop = tl.minimum(high, keys_before(tl.load(entry + 6).to(tl.int32), listed, chosen, prefix, PAGE))
        for step in range(tl.maximum(done, low), stop, BLOCK_K):
            key = step + tl.arange(0, BLOCK_K)
            of_list = key < tl.minimum(chosen, stop)
            start = tl.load(listed + 1 + key // PAGE, mask=of_list, other=0) * PAGE
            at = tl.where(of_list, start + key % PAGE, key - chosen + prefix)
            there = (key < stop) & ((at < prefix) == of_list)  # the prefix may cut its last page
            k_mask = there[None, :] & (column < SIZE)[:, None]
            v_mask = there[:, None] & (column < SIZE)[None, :]
            k_tile = tl.load(k + (at * SIZE)[None, :] + column[:, None], mask=k_mask, other=0.0)
            scores = tl.dot(queries, k_tile, input_precision="ieee") * scale_log2
            scores = tl.where(there[None, :] & (at[None, :] < limit[:, None]), scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, 1))
            # a row that has seen no key yet: any finite base will do, as all its exponentials are 0
            base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            weights = tl.exp2(scores - base[:, None])
            correction = tl.exp2(maximum - base)
            total = total * correction + tl.sum(weights, 1)
            v_tile = tl.load(v + (at * SIZE)[:, None] + column[None, :], mask=v_mask, other=0.0)
            accumulator = accumulator * correction[:, None]
            accumulator = tl.dot(weights.to(kv.dtype.element_ty), v_tile, accumulator, input_precision="ieee")
            maximum = new_maximum
        done = stop
    if SPLIT:
        program = (tile * tl.num_programs(1) + tl.program_id(1)) * splits + tl.program_id(2)
        partial = program * BLOCK_Q + index
        tl.store(partials + partial[:, None] * SIZE + column[None, :], accumulator, mask=mask)
        tl.store(partials + partial_rows * SIZE + partial, maximum, mask=here)
        tl.store(partials + partial_rows * (SIZE + 1) + partial, total, mask=here)
    else:
        sees = total != 0.0
        result = accumulator / tl.where(sees, total, 1.0)[:, None]
        # y may be q: this program alone reads these rows of these heads, and has read them
        place = row.to(tl.int64)[:, None] * y_stride + ((own * GROUP + member) * SIZE)[:, None] + column[None, :]
        tl.store(y + place, result.to(y.dtype.element_ty), mask=mask & sees[:, None])


def launch(
    *,
    q: Tensor,
    kv: Tensor,
    extents: Tensor,
    cu_extents: Tensor,
    selected: Tensor,
    owner: Tensor,
    captured: Tensor,
    seen: Tensor,
    cu_seqlens: Tensor,
    positions: Tensor,
    y: Tensor,
    layer: int,
    slot: int,
    sets: int,
    k: int,
    page: int,
    kv_heads: int,
    head_size: int,
    scale: float,
    attended: int = 0,
    block: int = 0,
    row_start: int = 0,
    scratch: Tensor | None = None,
) -> None:
    """Write the attention of the query rows into y [T, N*H]; y may be q itself."""
    group = check(
        q, kv, extents, cu_extents, selected, owner, captured, seen, cu_seqlens, positions, y, layer, slot, sets, k, page,
        kv_heads, head_size,
    )  # fmt: skip
    rows, sequences = q.shape[0], cu_seqlens.shape[0] - 1
    tile, part, tiles, heads = cut_of(q, sequences, group, sets, head_size)
    splits = kv_splits(tiles * heads, tile.rows, k + -(-rows // sequences), processors(q.device) * PLACES)
    partial_rows = tiles * heads * splits * tile.rows
    partials = partials_of("selected_attention", scratch, partial_rows, head_size) if splits > 1 else y
    shared = {
        "GROUP": group,
        "PART": part,
        "SIZE": head_size,
        "SEQUENCES": power_of_two(sequences, 1 << 16, least=SEQUENCES),
        "LEAST": KV_SPLIT_KEYS,
        "BLOCK_Q": tile.rows,
        "BLOCK_K": tile.columns,
        "BLOCK_H": power_of_two(head_size, 1 << 16, least=DOT_MINIMUM),
    }
    selected_attention_kernel[(tiles, heads, splits)](
        q,
        kv,
        extents,
        cu_extents,
        selected,
        owner,
        captured,
        seen,
        cu_seqlens,
        positions,
        y,
        partials,
        q.stride(0),
        kv.stride(0),
        selected.stride(0),
        y.stride(0),
        rows,
        row_start,
        sequences,
        splits,
        partial_rows,
        layer,
        slot,
        scale / math.log(2),
        **shared,
        HEADS=kv_heads,
        SETS=sets,
        PAGES=k // page,
        PAGE=page,
        SEEN=block,
        SPLIT=splits > 1,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        join(seen, cu_seqlens, y, partials, (tiles, heads, splits), row_start, shared, every=True)
