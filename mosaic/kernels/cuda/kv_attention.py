"""kv_attention on CUDA: softmax(q k^T * scale) v per sequence, over keys and values kept in rows of a state buffer.

Contract: kv_attention(q[T, N*H] sliced, kv[R, L*2*K*H] whole, extents[X, 4] int64 whole, cu_extents[B+1] int32 whole, seen[B]
int32 whole, cu_seqlens[B+1] int32 whole, positions[T] int32 sliced; layer, kv_heads, head_size, scale, span, keys, block) ->
y[T, N*H]; y may overwrite q; `span` and `keys` are for the cost model alone. Row r of q is row
`row_start + r` of the packed window and sees the first `seen` keys of its own sequence; with `block`, at position p, those
before (p // block + 1) * block. Where a key lies, `mosaic.registrar.operators.kv_store` says. A row in no sequence, or that
sees no key, is left as it was.

A tile's rows are tokens of one sequence times the query heads of one KV head, so that these share what is read of kv
(FlashAttention, Dao et al. 2022, with grouped queries packed). Where the tiles are few, as in decoding, each is split over
its keys (Flash-Decoding, Dao et al. 2023): programs leave partial results in scratch, and a second launch joins them.
Lengths are read on the device alone: how many programs start depends on shapes, so a captured launch serves other lengths.
Keys of one layer and head lie side by side within an extent, so they are read as rows of a matrix, not one by one.
Legend: T query rows, R rows, L layers, B sequences, X extents, N query heads, K KV heads, H head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

from mosaic.errors import RuntimeMemoryError
from mosaic.kernels.cuda.shared.launching import DOT_MINIMUM, Tile, power_of_two, processors, since, tl, triton
from mosaic.kernels.kv_attention import check, reference
from mosaic.registrar.operators.kv_attention import KV_SPLIT_KEYS, kv_splits

__all__ = ["find_tile", "join_kernel", "launch", "partials_of", "reference", "share_of", "tile_of"]

# By architecture and item size, the fewest rows first: query rows, keys, unused, warps, stages. The largest are of the
# shapes that `attention` was measured with; a launch takes the first that a sequence's rows fit into, or else the last.
# Before Hopper 64 rows spill in 4 warps.
Tiles = tuple[Tile, ...]
FULL: Final[Tiles] = (Tile(16, 32, 0, 4, 1), Tile(32, 32, 0, 8, 1))
FEW: Final[Tiles] = (Tile(16, 64, 0, 4, 3), Tile(32, 64, 0, 4, 3))
SMALL: Final = {2: (*FEW, Tile(64, 64, 0, 8, 3)), 4: FULL}
HOPPER: Final = {2: (*FEW, Tile(64, 64, 0, 4, 3), Tile(128, 64, 0, 8, 4)), 4: FULL}
TILES: Final = {80: SMALL, 90: HOPPER, 120: SMALL}
NARROW: Final = {2: (Tile(16, 32, 0, 4, 2), Tile(64, 32, 0, 8, 2)), 4: (Tile(16, 16, 0, 4, 1),)}
WIDEST: Final = 128
PLACES: Final = {True: 1, False: 2}
"""Programs that a multiprocessor runs at a time, of tiles of more than 64 rows and of others."""
JOINED: Final = 16
"""Splits that the second launch reads at a time."""
SEQUENCES: Final = 16
"""Least sequences that a kernel is compiled for, beyond them powers of two."""
JOIN_WARPS: Final = 4


@triton.jit
def find_tile(tile, cu_seqlens, sequences, row_start, rows, TOKENS: tl.constexpr, SEQUENCES: tl.constexpr):
    """Where a tile lies, of those that the sequences' rows of this slice are cut into.

    Its first row, the end of the sequence's rows, and the sequence; all 0 beyond the last tile.
    """
    sequence = tl.arange(0, SEQUENCES)
    known = sequence < sequences
    start = tl.maximum(tl.load(cu_seqlens + sequence, mask=known, other=0) - row_start, 0)
    end = tl.minimum(tl.load(cu_seqlens + sequence + 1, mask=known, other=0) - row_start, rows)
    tiles = tl.where(known & (end > start), (end - start + TOKENS - 1) // TOKENS, 0)
    before = tl.cumsum(tiles, 0) - tiles
    mine = (tile >= before) & (tile < before + tiles)
    first = tl.sum(tl.where(mine, start + (tile - before) * TOKENS, 0), 0)
    return first, tl.sum(tl.where(mine, end, 0), 0), tl.sum(tl.where(mine, sequence, 0), 0)


@triton.jit
def share_of(keys, splits, BLOCK_K: tl.constexpr, LEAST: tl.constexpr):
    """The keys of one split, of those of a sequence: whole tiles, and enough to be worth a program."""
    return tl.maximum(tl.cdiv(tl.cdiv(keys, splits), BLOCK_K) * BLOCK_K, LEAST)


@triton.jit(do_not_specialize=["rows", "row_start", "sequences", "splits", "partial_rows", "layer"])
def kv_attention_kernel(
    q,
    kv,
    extents,
    cu_extents,
    seen,
    cu_seqlens,
    positions,
    y,
    partials,
    q_stride,
    kv_stride,
    y_stride,
    rows,
    row_start,
    sequences,
    splits,
    partial_rows,
    layer,
    scale_log2,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PART: tl.constexpr,
    SIZE: tl.constexpr,
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
    kv_head = tl.program_id(1) // PARTS
    first, last, sequence = find_tile(tile, cu_seqlens, sequences, row_start, rows, TOKENS, SEQUENCES)
    keys = tl.load(seen + sequence)
    index = tl.arange(0, BLOCK_Q)
    row = first + index // PART
    member = tl.program_id(1) % PARTS * PART + index % PART
    here = (index < TOKENS * PART) & (member < GROUP) & (row < last)
    # the keys [0, limit) that each row sees, and [0, high) that any of them does
    limit = tl.where(here, keys, 0)
    if SEEN:
        position = tl.load(positions + row, mask=here, other=0)
        limit = tl.minimum(limit, (position // SEEN + 1) * SEEN)
    high = tl.max(limit, 0)
    low = 0
    if SPLIT:
        share = share_of(keys, splits, BLOCK_K, LEAST)
        low = tl.program_id(2) * share
        high = tl.minimum(high, low + share)
        here = here & (low < keys)  # later splits have nothing to say, and nobody reads what they say

    column = tl.arange(0, BLOCK_H)
    place = row.to(tl.int64)[:, None] * q_stride + ((kv_head * GROUP + member) * SIZE)[:, None] + column[None, :]
    mask = here[:, None] & (column < SIZE)[None, :]
    queries = tl.load(q + place, mask=mask, other=0.0)
    key = tl.arange(0, BLOCK_K)
    maximum = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    accumulator = tl.zeros([BLOCK_Q, BLOCK_H], tl.float32)
    last_extent = tl.load(cu_extents + sequence + 1)
    for extent in range(tl.load(cu_extents + sequence), last_extent):
        entry = extents + extent * 4
        count = tl.load(entry + 1)
        begin = tl.load(entry + 2).to(tl.int32)
        end = tl.load(entry + 6, mask=extent + 1 < last_extent, other=2147483647).to(tl.int32)
        # where the key of position 0 would lie, were the extent to reach there
        origin = tl.load(entry + 3) - begin
        k = kv + tl.load(entry) * kv_stride + ((2 * layer * HEADS + kv_head) * count + origin) * SIZE
        v = k + HEADS * count * SIZE
        stop = tl.minimum(end, high)
        for step in range(tl.maximum(begin, low), stop, BLOCK_K):
            there = step + key < stop
            offset = (step + key) * SIZE
            k_mask = there[None, :] & (column < SIZE)[:, None]
            v_mask = there[:, None] & (column < SIZE)[None, :]
            k_tile = tl.load(k + offset[None, :] + column[:, None], mask=k_mask, other=0.0)
            scores = tl.dot(queries, k_tile, input_precision="ieee") * scale_log2
            if SEEN:
                scores = tl.where(there[None, :] & (step + key[None, :] < limit[:, None]), scores, float("-inf"))
            else:
                scores = tl.where(there[None, :], scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, 1))
            # a row that has seen no key yet: any finite base will do, as all its exponentials are 0
            base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            weights = tl.exp2(scores - base[:, None])
            correction = tl.exp2(maximum - base)
            total = total * correction + tl.sum(weights, 1)
            v_tile = tl.load(v + offset[:, None] + column[None, :], mask=v_mask, other=0.0)
            accumulator = accumulator * correction[:, None]
            accumulator = tl.dot(weights.to(kv.dtype.element_ty), v_tile, accumulator, input_precision="ieee")
            maximum = new_maximum
    if SPLIT:
        program = (tile * tl.num_programs(1) + tl.program_id(1)) * splits + tl.program_id(2)
        partial = program * BLOCK_Q + index
        tl.store(partials + partial[:, None] * SIZE + column[None, :], accumulator, mask=mask)
        tl.store(partials + partial_rows * SIZE + partial, maximum, mask=here)
        tl.store(partials + partial_rows * (SIZE + 1) + partial, total, mask=here)
    else:
        sees = limit > 0
        result = accumulator / tl.where(sees, total, 1.0)[:, None]
        # y may be q: this program alone reads these rows of these heads, and has read them
        place = row.to(tl.int64)[:, None] * y_stride + ((kv_head * GROUP + member) * SIZE)[:, None] + column[None, :]
        tl.store(y + place, result.to(y.dtype.element_ty), mask=mask & sees[:, None])


@triton.jit(do_not_specialize=["rows", "row_start", "sequences", "splits", "partial_rows"])
def join_kernel(
    seen,
    cu_seqlens,
    y,
    partials,
    y_stride,
    rows,
    row_start,
    sequences,
    splits,
    partial_rows,
    GROUP: tl.constexpr,
    PART: tl.constexpr,
    SIZE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    EVERY: tl.constexpr,
):
    """One row of one tile: its partial results of all splits that its keys need, or of `EVERY` split, into y."""
    PARTS: tl.constexpr = (GROUP + PART - 1) // PART
    TOKENS: tl.constexpr = BLOCK_Q // PART
    index = tl.program_id(0)
    tile = tl.program_id(1)
    first, last, sequence = find_tile(tile, cu_seqlens, sequences, row_start, rows, TOKENS, SEQUENCES)
    row = first + index // PART
    member = tl.program_id(2) % PARTS * PART + index % PART
    useful = splits
    if not EVERY:
        keys = tl.load(seen + sequence)
        useful = tl.cdiv(keys, share_of(keys, splits, BLOCK_K, LEAST))
    useful = tl.where((index < TOKENS * PART) & (member < GROUP) & (row < last), useful, 0)
    column = tl.arange(0, BLOCK_H)
    maximum = float("-inf")
    total = 0.0
    accumulator = tl.zeros([BLOCK_H], tl.float32)
    begin = (tile * tl.num_programs(2) + tl.program_id(2)) * splits
    for step in range(0, useful, BLOCK_S):
        split = step + tl.arange(0, BLOCK_S)
        partial = (begin + split) * BLOCK_Q + index
        maxima = tl.load(partials + partial_rows * SIZE + partial, mask=split < useful, other=float("-inf"))
        totals = tl.load(partials + partial_rows * (SIZE + 1) + partial, mask=split < useful, other=0.0)
        mask = (split < useful)[:, None] & (column < SIZE)[None, :]
        parts = tl.load(partials + partial[:, None] * SIZE + column[None, :], mask=mask, other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(maxima, 0))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(maxima - base)
        correction = tl.exp2(maximum - base)
        total = total * correction + tl.sum(totals * weights, 0)
        accumulator = accumulator * correction + tl.sum(parts * weights[:, None], 0)
        maximum = new_maximum
    totals = tl.zeros([BLOCK_H], tl.float32) + total
    sees = totals != 0.0
    result = accumulator / tl.where(sees, totals, 1.0)
    place = row.to(tl.int64) * y_stride + (tl.program_id(2) // PARTS * GROUP + member) * SIZE + column
    tl.store(y + place, result.to(y.dtype.element_ty), mask=(column < SIZE) & sees)


def launch(
    *,
    q: Tensor,
    kv: Tensor,
    extents: Tensor,
    cu_extents: Tensor,
    seen: Tensor,
    cu_seqlens: Tensor,
    positions: Tensor,
    y: Tensor,
    layer: int,
    kv_heads: int,
    head_size: int,
    scale: float,
    span: int = 0,
    keys: int = 0,
    block: int = 0,
    row_start: int = 0,
    scratch: Tensor | None = None,
) -> None:
    """Write the attention of the query rows into y [T, N*H]; y may be q itself."""
    group = check(q, kv, extents, cu_extents, seen, cu_seqlens, positions, y, layer, kv_heads, head_size)
    rows, sequences = q.shape[0], cu_seqlens.shape[0] - 1
    tile, part, tiles, heads = cut_of(q, sequences, group, kv_heads, head_size)
    places = processors(q.device) * PLACES[tile.rows > 64]
    splits = kv_splits(tiles * heads, tile.rows, kv.shape[0], places)
    partial_rows = tiles * heads * splits * tile.rows
    partials = partials_of("kv_attention", scratch, partial_rows, head_size) if splits > 1 else y
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
    kv_attention_kernel[(tiles, heads, splits)](
        q,
        kv,
        extents,
        cu_extents,
        seen,
        cu_seqlens,
        positions,
        y,
        partials,
        q.stride(0),
        kv.stride(0),
        y.stride(0),
        rows,
        row_start,
        sequences,
        splits,
        partial_rows,
        layer,
        scale / math.log(2),
        **shared,
        HEADS=kv_heads,
        SEEN=block,
        SPLIT=splits > 1,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        join(seen, cu_seqlens, y, partials, (tiles, heads, splits), row_start, shared, every=False)


class Cut(NamedTuple):
    """How query rows are cut: into `tiles` tiles, whose rows are tokens times `part` heads, each for `heads` parts of heads."""

    tile: Tile
    part: int
    tiles: int
    heads: int


def cut_of(q: Tensor, sequences: int, group: int, heads: int, head_size: int) -> Cut:
    """Cut the rows of q into as many tiles as those of the sequences may need, whatever their lengths; `group` of its heads
    share keys, and there are `heads` such groups."""
    rows = q.shape[0]
    tile = tile_of(q, head_size, -(-rows // sequences) * group)
    part = min(group, tile.rows)
    tokens = tile.rows // part
    return Cut(tile, part, (rows + sequences * (tokens - 1)) // tokens, heads * -(-group // part))


def join(
    seen: Tensor, cu_seqlens: Tensor, y: Tensor, partials: Tensor, grid: tuple[int, int, int], row_start: int,
    shared: Mapping[str, int], *, every: bool,
) -> None:  # fmt: skip
    """Join the partial results of the splits, those that a sequence's keys need or `every`, into y.

    `grid` is that of the programs that left them: tiles, parts of heads, splits; `shared` the constants that they had.
    """
    tiles, heads, splits = grid
    join_kernel[(shared["BLOCK_Q"], tiles, heads)](
        seen,
        cu_seqlens,
        y,
        partials,
        y.stride(0),
        y.shape[0],
        row_start,
        cu_seqlens.shape[0] - 1,
        splits,
        tiles * heads * splits * shared["BLOCK_Q"],
        **shared,
        BLOCK_S=JOINED,
        EVERY=every,
        num_warps=JOIN_WARPS,
    )


def tile_of(q: Tensor, head_size: int, rows: int) -> Tile:
    """Choose the smallest tile that `rows` rows fit into, or the largest."""
    table = since(TILES, q) if head_size <= WIDEST else NARROW
    tiles = table[max(2, min(q.element_size(), 4))]
    return next((tile for tile in tiles if tile.rows >= rows), tiles[-1])


def partials_of(kernel: str, scratch: Tensor | None, rows: int, head_size: int) -> Tensor:
    """View the scratch buffer as float32 rows, then their maxima, then their sums."""
    return floats_of(kernel, scratch, rows * (head_size + 2))


def floats_of(kernel: str, scratch: Tensor | None, count: int) -> Tensor:
    """View the beginning of the scratch buffer as float32 [count]."""
    needed, available = 4 * count, 0 if scratch is None else scratch.numel()
    if scratch is None or available < needed:
        raise RuntimeMemoryError(
            f"{kernel}: scratch of {available:,} bytes, {needed:,} needed: give the plan's scratch buffer, sized by "
            f"the operator's scratch on cuda."
        )
    return scratch[:needed].view(torch.float32)
