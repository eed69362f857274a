"""selected_attention on CUDA: softmax(q k^T * scale) v per sequence, over selected keys of a prefix and all keys after it.

Row r of q is row `row_start + r` of the packed window. A row in no sequence, or without a visible key, is unchanged.

A program's rows are tokens of one sequence times the query heads of one set; where tiles of the block's rows have sets
of their own, those of them that are in one tile: a program for each tile goes over the same tokens, and ends at once if
none is in its own. Its keys are one list in order of position: the selected ones, then those from the end of the prefix
on. The keys of one extent lie side by side in the list, and are read one by one. Few tiles are split over their keys,
and a second launch joins the partial results from scratch. Lengths and counts are read on the device alone: the number
of programs depends on shapes, so a captured launch serves others. Legend: T query rows, R rows of the state, L layers,
B sequences, X extents, E rows of selections, N query heads, K KV heads, H head size.
"""

import math
import sys
from collections.abc import Mapping
from functools import partial
from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.kv_attention import NARROW, WIDEST
from mosaic.kernels.cuda.shared.launching import DOT_MINIMUM, Tile, power_of_two, processors, since, tl, triton
from mosaic.kernels.cuda.shared.scratch import floats_of
from mosaic.kernels.cuda.shared.sequences import SEQUENCES, share_of
from mosaic.registrar.operators.selected_attention import SPLIT_KEYS, splits_of

PLACES: Final = 2
"""Programs that a multiprocessor runs at a time."""
JOIN_WARPS: Final = 1
# By architecture and item size, the fewest rows first: query rows, keys, unused, warps, stages. A launch takes the first that a
# sequence's rows fit into, or else the last. On one H200, 32 queries of 32/8 heads of 128, 1,024 keys of each set: 12.2 us with the
# last of Hopper's and one stage, 13.5 with two, 16.0 with the last of `FEW`; eight such requests 35 us with three stages, where one
# stage takes 52 and the last of `FEW` 47.
Tiles = tuple[Tile, ...]
FULL: Final[Tiles] = (Tile(16, 32, 0, 4, 1), Tile(32, 32, 0, 8, 1))
FEW: Final[Tiles] = (Tile(16, 64, 0, 4, 3), Tile(32, 64, 0, 4, 3))
SMALL: Final[Tiles] = (FEW[0], Tile(32, 64, 0, 8, 2))  # four warps and three stages spill
TILES: Final[Mapping[int, Mapping[int, Tiles]]] = {
    80: {2: SMALL, 4: FULL},
    90: {2: (*FEW, Tile(64, 64, 0, 4, 3)), 4: FULL},
    120: {2: SMALL, 4: FULL},
}
AHEAD_ROWS: Final = 64
"""Rows of the tiles whose indices are loaded a tile of keys ahead: smaller ones have no registers for them."""
UNSTAGED_TILES: Final = 2
"""Tiles of keys of such a program that are not worth stages."""


@triton.jit
def keys_before(end, listed, chosen, prefix, PAGE: tl.constexpr):
    """Count the selected keys that lie before position `end`: they are ascending."""
    low = end * 0
    high = chosen // PAGE
    while low < high:
        middle = (low + high) // 2
        before = tl.load(listed + 1 + middle) * PAGE < end
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    # the number of pages that begin before it; the last of them may go beyond
    beyond = tl.maximum((tl.load(listed + low, mask=low > 0, other=-1) + 1) * PAGE - end, 0)
    return tl.where(end < prefix, low * PAGE - beyond, chosen)


@triton.jit
def of(mine, values):
    """The value of the sequence that is `mine`; 0 where none is."""
    return tl.sum(tl.where(mine, values, 0), 0)


@triton.jit(do_not_specialize=["rows", "row_start", "sequences", "splits", "layer", "slot"])
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
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    SPLIT: tl.constexpr,
    AHEAD: tl.constexpr,
    SEQUENCES: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    PARTS: tl.constexpr = (GROUP + PART - 1) // PART
    TOKENS: tl.constexpr = BLOCK_Q // PART
    tile = tl.program_id(0)
    own = tl.program_id(1) // (PARTS * TILES)
    number = own * TILES + tl.program_id(1) % TILES
    # a launch is a chain of loads, each as slow as memory is far: all that is known of sequences is loaded at once
    every = tl.arange(0, SEQUENCES)
    known = every < sequences
    starts = tl.maximum(tl.load(cu_seqlens + every, mask=known, other=0) - row_start, 0)
    ends = tl.minimum(tl.load(cu_seqlens + every + 1, mask=known, other=0) - row_start, rows)
    all_seen = tl.load(seen + every, mask=known, other=0)
    prefixes = tl.load(captured + every, mask=known, other=0)
    owners = tl.load(owner + every, mask=known, other=0)
    first_extents = tl.load(cu_extents + every, mask=known, other=0)
    last_extents = tl.load(cu_extents + every + 1, mask=known, other=0)
    tiles = tl.where(known & (ends > starts), (ends - starts + TOKENS - 1) // TOKENS, 0)
    before = tl.cumsum(tiles, 0) - tiles
    mine = (tile >= before) & (tile < before + tiles)
    first = of(mine, starts + (tile - before) * TOKENS)
    index = tl.arange(0, BLOCK_Q)
    row = first + index // PART
    member = tl.program_id(1) // TILES % PARTS * PART + index % PART
    here = (index < TOKENS * PART) & (member < GROUP) & (row < of(mine, ends))
    if SEEN:
        position = tl.load(positions + row, mask=here, other=0)
    if TILES > 1:  # of the rows of all tiles, those of one
        here = here & (position % SEEN // ROWS == number % TILES)
    # each row sees, of the keys in the list, those at positions [0, limit)
    limit = tl.where(here, of(mine, all_seen), 0)
    if SEEN:
        limit = tl.minimum(limit, (position // SEEN + 1) * SEEN)
    most = tl.max(limit, 0)
    prefix = of(mine, prefixes)
    listed = selected + of(mine, owners) * selected_stride + (slot * SETS * TILES + number) * (PAGES + 1)
    chosen = tl.load(listed, mask=(prefix > 0) & (most > 0), other=0) * PAGE
    # the list: keys behind the prefix, then those selected. Where they lie is known before it is known how many these are
    behind = tl.maximum(most - prefix, 0)
    bound = tl.where(most > 0, behind + tl.minimum(tl.cdiv(prefix, PAGE), PAGES) * PAGE, 0)
    low = 0
    if SPLIT:
        share = share_of(bound, splits, BLOCK_K, LEAST)
        low = tl.program_id(2) * share
        bound = tl.minimum(bound, low + share)

    column = tl.arange(0, BLOCK_H)
    place = row.to(tl.int64)[:, None] * q_stride + ((own * GROUP + member) * SIZE)[:, None] + column[None, :]
    mask = here[:, None] & (column < SIZE)[None, :]
    queries = tl.load(q + place, mask=mask, other=0.0)
    maximum = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    accumulator = tl.zeros([BLOCK_Q, BLOCK_H], tl.float32)
    first_extent = of(mine, first_extents)
    last_extent = of(mine, last_extents)
    extents_of_it = last_extent - first_extent
    kv_head = own // (SETS // HEADS)
    for extent in range(first_extent, last_extent):
        entry = extents + extent * 4
        count = tl.load(entry + 1)
        begin = tl.load(entry + 2).to(tl.int32)
        end = tl.load(entry + 6, mask=extent + 1 < last_extent, other=2147483647).to(tl.int32)
        # where the key of position 0 would lie if the extent reached there
        origin = tl.load(entry + 3) - begin
        k = kv + tl.load(entry) * kv_stride + ((2 * layer * HEADS + kv_head) * count + origin) * SIZE
        v = k + HEADS * count * SIZE
        start = low
        stop = bound
        if extents_of_it > 1:  # one that ends before the prefix does has selected keys alone
            if end <= prefix:
                start = tl.maximum(low, behind + keys_before(begin, listed, chosen, prefix, PAGE))
                stop = tl.minimum(bound, behind + keys_before(end, listed, chosen, prefix, PAGE))
            elif begin >= prefix:
                stop = tl.minimum(bound, behind)
        key = start + tl.arange(0, BLOCK_K)
        page = tl.load(listed + 1 + (key - behind) // PAGE, mask=AHEAD & (key >= behind) & (key < stop), other=0)
        for step in range(start, tl.minimum(stop, behind + chosen), BLOCK_K):
            key = step + tl.arange(0, BLOCK_K)
            of_list = key >= behind
            if AHEAD:
                following = key + BLOCK_K
                inside = (following >= behind) & (following < stop)
                next_page = tl.load(listed + 1 + (following - behind) // PAGE, mask=inside, other=0)
            else:
                page = tl.load(listed + 1 + (key - behind) // PAGE, mask=of_list & (key < stop), other=0)
            at = tl.where(of_list, page * PAGE + (key - behind) % PAGE, prefix + key)
            # the prefix may cut its last page
            there = (key < tl.minimum(stop, behind + chosen)) & (at >= begin) & (at < end) & ((at < prefix) == of_list)
            if AHEAD:
                page = next_page
            k_mask = there[None, :] & (column < SIZE)[:, None]
            v_mask = there[:, None] & (column < SIZE)[None, :]
            k_tile = tl.load(k + (at * SIZE)[None, :] + column[:, None], mask=k_mask, other=0.0)
            v_tile = tl.load(v + (at * SIZE)[:, None] + column[None, :], mask=v_mask, other=0.0)
            scores = tl.dot(queries, k_tile, input_precision="ieee") * scale_log2
            scores = tl.where(there[None, :] & (at[None, :] < limit[:, None]), scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, 1))
            # a row that has seen no key yet: any finite base will do, as all its exponentials are 0
            base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            weights = tl.exp2(scores - base[:, None])
            correction = tl.exp2(maximum - base)
            total = total * correction + tl.sum(weights, 1)
            accumulator = accumulator * correction[:, None]
            accumulator = tl.dot(weights.to(kv.dtype.element_ty), v_tile, accumulator, input_precision="ieee")
            maximum = new_maximum
    if SPLIT:
        items = rows * (SETS * GROUP)
        partial = tl.program_id(2) * items + row * (SETS * GROUP) + own * GROUP + member
        tl.store(partials + partial[:, None] * SIZE + column[None, :], accumulator, mask=mask & (total > 0.0)[:, None])
        tl.store(partials + splits * items * SIZE + partial, maximum, mask=here)
        tl.store(partials + splits * items * (SIZE + 1) + partial, total, mask=here)
    else:
        sees = total != 0.0
        result = accumulator / tl.where(sees, total, 1.0)[:, None]
        # y may be q: this program alone reads these rows of these heads, and has read them
        place = row.to(tl.int64)[:, None] * y_stride + ((own * GROUP + member) * SIZE)[:, None] + column[None, :]
        tl.store(y + place, result.to(y.dtype.element_ty), mask=mask & sees[:, None])


@triton.jit(do_not_specialize=["rows", "row_start", "sequences"])
def join_kernel(
    cu_seqlens,
    y,
    partials,
    y_stride,
    rows,
    row_start,
    sequences,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One of the `COUNT` heads of one row: its partial results of all splits into y."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    # rows in no sequence have none
    first = tl.load(cu_seqlens)
    last = tl.load(cu_seqlens + sequences)
    items = rows * COUNT
    split = tl.arange(0, BLOCK_S)
    partial = split * items + row * COUNT + head
    some = split < SPLITS
    maxima = tl.load(partials + SPLITS * items * SIZE + partial, mask=some, other=float("-inf"))
    totals = tl.load(partials + SPLITS * items * (SIZE + 1) + partial, mask=some, other=0.0)
    column = tl.arange(0, BLOCK_H)
    place = partials + partial[:, None] * SIZE + column[None, :]
    parts = tl.load(place, mask=some[:, None] & (column < SIZE)[None, :], other=0.0)
    maximum = tl.max(tl.where(totals > 0.0, maxima, float("-inf")), 0)
    weights = tl.where(totals > 0.0, tl.exp2(maxima - tl.where(maximum == float("-inf"), 0.0, maximum)), 0.0)
    total = tl.sum(tl.where(totals > 0.0, totals, 0.0) * weights, 0)
    accumulator = tl.sum(tl.where(totals[:, None] > 0.0, parts, 0.0) * weights[:, None], 0)
    sees = (row + row_start >= first) & (row + row_start < last) & (total > 0.0)
    result = accumulator / tl.where(total > 0.0, total, 1.0)
    tl.store(
        y + row.to(tl.int64) * y_stride + head * SIZE + column,
        result.to(y.dtype.element_ty),
        mask=(column < SIZE) & sees,
    )


def launch(
    *, q: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, selected: Tensor, owner: Tensor, captured: Tensor,
    seen: Tensor, cu_seqlens: Tensor, positions: Tensor, y: Tensor, layer: int, slot: int, sets: int, k: int, page: int,
    kv_heads: int, head_size: int, scale: float, attended: int = 0, block: int = 0, rows: int = 0, tiles: int = 1,
    row_start: int = 0, fixed: bool = False, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the attention of the query rows into y [T, N*H]; y may be q itself.

    If `fixed`, tiles and splits are the same whatever the number of rows and sequences: one program goes through all keys.
    """
    group = q.shape[1] // (sets * head_size)
    count, sequences, heads = q.shape[0], cu_seqlens.shape[0] - 1, group * sets
    mean = -(-count // sequences)
    tile = tile_of(q, head_size, sys.maxsize if fixed else (min(mean, rows) if rows else mean) * group)
    part = min(group, tile.rows)
    tokens = tile.rows // part
    windows, parts = (count + sequences * (tokens - 1)) // tokens, sets * -(-group // part)
    keys = k + mean
    splits = 1 if fixed else splits_of(windows * parts, count * heads, keys, processors(q.device) * PLACES)
    few = keys <= splits * UNSTAGED_TILES * tile.columns
    partials = floats_of("selected_attention", scratch, splits * count * heads * (head_size + 2)) if splits > 1 else y
    block_h = power_of_two(head_size, 1 << 16, least=DOT_MINIMUM)
    selected_attention_kernel[(windows, parts * tiles, splits)](
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
        count,
        row_start,
        sequences,
        splits,
        layer,
        slot,
        scale / math.log(2),
        HEADS=kv_heads,
        SETS=sets,
        GROUP=group,
        PART=part,
        SIZE=head_size,
        PAGES=k // page,
        PAGE=page,
        SEEN=block,
        ROWS=rows,
        TILES=tiles,
        SPLIT=splits > 1,
        AHEAD=tile.rows >= AHEAD_ROWS,
        SEQUENCES=power_of_two(sequences, 1 << 16, least=SEQUENCES),
        LEAST=SPLIT_KEYS,
        BLOCK_Q=tile.rows,
        BLOCK_K=tile.columns,
        BLOCK_H=block_h,
        num_warps=tile.warps,
        num_stages=1 if few and tile.rows >= AHEAD_ROWS else tile.stages,
    )
    if splits > 1:
        join_kernel[(count, heads)](
            cu_seqlens,
            y,
            partials,
            y.stride(0),
            count,
            row_start,
            sequences,
            COUNT=heads,
            SIZE=head_size,
            SPLITS=splits,
            BLOCK_S=power_of_two(splits, 1 << 16),
            BLOCK_H=block_h,
            num_warps=JOIN_WARPS,
        )


def tile_of(q: Tensor, head_size: int, rows: int) -> Tile:
    """Choose the smallest tile that `rows` rows fit into, or the largest."""
    table = since(TILES, q) if head_size <= WIDEST else NARROW
    tiles = table[max(2, min(q.element_size(), 4))]
    return next((tile for tile in tiles if tile.rows >= rows), tiles[-1])


launch_invariant = partial(launch, fixed=True)
