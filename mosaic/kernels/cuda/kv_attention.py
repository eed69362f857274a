"""kv_attention on CUDA: softmax(q k^T * scale) v per sequence, over keys and values kept in rows of a state buffer.

Row r of q is row `row_start + r` of the packed window and sees the first `seen` keys of its own sequence; with `block`,
at position p, those before (p // block + 1) * block; with `sees`, those at positions in [sees[r, 0], sees[r, 1]).
`mosaic.registrar.operators.kv_store` describes the layout of keys. A row in no sequence, or without a visible key, is
unchanged.

A tile's rows are tokens of one sequence times the query heads of one KV head, so that these share what is read of kv
(FlashAttention, Dao et al. 2022, with grouped queries packed). Where tiles are of a mean window's size, windows that are much
longer, as a prompt's chunk among blocks, have larger ones: else they would read their keys again for every few tokens. The keys
of a sequence are cut into segments, as `kv_segments` says, by its own window and keys alone. Each has results of its own, which
are joined in order. Where scratch has room for them, each segment has a program (Flash-Decoding, Dao et al. 2023), which leaves
them there, and a second launch joins them. Elsewhere one program joins as it goes, to the same bits. Lengths are read on the
device alone: how many programs start depends on shapes, so a captured launch serves other lengths. Only tiles of keys that not
every row sees whole are masked. Keys of one layer and head lie side by side within an extent, so they are read as rows of a
matrix, not one by one. `prefix_attention` is the same launch: whatever writes a row of y has its maximum and its sum, and
writes their logarithm too. Legend: T query rows, R rows, L layers, B sequences, X extents, N query heads, K KV heads, H head
size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import DOT_MINIMUM, Tile, power_of_two, since, tl, triton
from mosaic.kernels.cuda.shared.scratch import floats_of
from mosaic.kernels.cuda.shared.sequences import SEQUENCES, find_tile
from mosaic.registrar.operators.kv_attention import (
    KV_SEGMENT_ALIGNED,
    KV_SEGMENT_KEYS,
    KV_SEGMENT_TOKENS,
    KV_SEGMENTS,
)

__all__ = ["launch", "launch_invariant", "tile_of"]

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
LARGE_ROWS: Final = 128
"""Rows of the tiles that cards may have a kernel of their own for."""
Large: TypeAlias = Callable[..., None]
"""Launches that kernel: takes the grid, q, kv, and operands, sizes and constants as the plain one has them."""
FIXED_ROWS: Final = 64
"""Rows of a tile from which on each warp has whole rows: such tiles of one table give a row the same bits."""
JOINED_HEADS: Final = 8
"""Heads of a row that a program joins the segments of."""
JOIN_WARPS: Final = 4


@triton.jit
def segments_of(
    cu_seqlens, seen, sequences, capacity,
    SEQUENCES: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT_KEYS: tl.constexpr, SEGMENT_TOKENS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """For every sequence: the keys of one segment, the number of segments, and where its partial results begin.

    As `mosaic.registrar.operators.kv_attention.kv_segments` says. They begin at -1 where the sequence has one segment alone, or
    where there is no room for those of all: there the segments go to one program.
    """
    sequence = tl.arange(0, SEQUENCES)
    known = sequence < sequences
    start = tl.load(cu_seqlens + sequence, mask=known, other=0)
    window = tl.load(cu_seqlens + sequence + 1, mask=known, other=0) - start
    keys = tl.load(seen + sequence, mask=known, other=0)
    wanted = tl.minimum(tl.maximum(SEGMENT_TOKENS // tl.maximum(window, 1), 1), SEGMENTS)
    wanted = tl.minimum(wanted, tl.maximum(tl.cdiv(keys, SEGMENT_KEYS), 1))
    share = tl.maximum(tl.cdiv(tl.cdiv(keys, wanted), ALIGNED) * ALIGNED, ALIGNED)
    count = tl.maximum(tl.cdiv(keys, share), 1)
    parts = tl.where(count > 1, window * count, 0)
    end = tl.cumsum(parts, 0)
    begin = tl.where((parts > 0) & (end <= capacity), end - parts, -1)
    return sequence, start, window, share, count, begin


@triton.jit
def of_one(values, sequence, number):
    """The value of one sequence."""
    return tl.sum(tl.where(sequence == number, values, 0), 0)


@triton.jit
def attend_tile(queries, k_tile, v_tile, keep, scale_log2, maximum, total, accumulator, MASKED: tl.constexpr):
    """Online softmax over one tile of keys; rows that have seen none keep the maximum -inf."""
    scores = tl.dot(queries, tl.trans(k_tile), input_precision="ieee")
    if MASKED:
        scores = tl.where(keep, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale_log2)
    base = new_maximum
    if MASKED:
        # a row that has seen no key yet: any finite base will do, as all its exponentials are 0
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(scores * scale_log2 - base[:, None])
    correction = tl.exp2(maximum - base)
    total = total * correction + tl.sum(weights, 1)
    accumulator = tl.dot(weights.to(v_tile.dtype), v_tile, accumulator * correction[:, None], input_precision="ieee")
    return new_maximum, total, accumulator


@triton.jit
def joined(maximum, total, accumulator, part_maximum, part_total, part):
    """The results of some segments, and those of the next one: the same bits in whichever program."""
    new_maximum = tl.maximum(maximum, part_maximum)
    base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    kept = tl.exp2(maximum - base)
    added = tl.exp2(part_maximum - base)
    total = tl.fma(total, kept, part_total * added)
    accumulator = tl.fma(accumulator, tl.broadcast_to(kept[:, None], accumulator.shape), part * added[:, None])
    return new_maximum, total, accumulator


@triton.jit
def attend_rows(
    q, kv, extents, first_extent, last_extent, positions, y, logsumexp, partials, q_stride, kv_stride, y_stride, sums_stride,
    row_start, capacity, layer, scale_log2, sees, first, last, keys, share, segment, segments, own, begin_part, window, start_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, SIZE: tl.constexpr, SEEN: tl.constexpr, SEES: tl.constexpr,
    SPLIT: tl.constexpr, SUMS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A tile of `BLOCK_Q` rows of one sequence, over the keys of some of its segments."""
    PARTS: tl.constexpr = (GROUP + PART - 1) // PART
    TOKENS: tl.constexpr = BLOCK_Q // PART
    kv_head = tl.program_id(1) // PARTS
    index = tl.arange(0, BLOCK_Q)
    row = first + index // PART
    member = tl.program_id(1) % PARTS * PART + index % PART
    here = (index < TOKENS * PART) & (member < GROUP) & (row < last)
    # the keys [0, limit) that each row sees, [0, low) that all do, and [0, high) that any of them does
    limit = tl.where(here, keys, 0)
    if SEEN:
        position = tl.load(positions + row, mask=here, other=0)
        limit = tl.minimum(limit, (position // SEEN + 1) * SEEN)
    low = tl.min(tl.where(here, limit, keys), 0)
    if SEES:  # every tile of keys may hide some from a row
        limit = tl.minimum(limit, tl.load(sees + row * 2 + 1, mask=here, other=0))
        since = tl.load(sees + row * 2, mask=here, other=0)
        low = 0
    high = tl.max(limit, 0)

    column = tl.arange(0, BLOCK_H)
    place = row.to(tl.int64)[:, None] * q_stride + ((kv_head * GROUP + member) * SIZE)[:, None] + column[None, :]
    mask = here[:, None] & (column < SIZE)[None, :]
    queries = tl.load(q + place, mask=mask, other=0.0)
    key = tl.arange(0, BLOCK_K)
    all_maximum = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    all_total = tl.zeros([BLOCK_Q], tl.float32)
    all_accumulator = tl.zeros([BLOCK_Q, BLOCK_H], tl.float32)
    while segment < segments:
        maximum = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_Q], tl.float32)
        accumulator = tl.zeros([BLOCK_Q, BLOCK_H], tl.float32)
        for extent in range(first_extent, last_extent):
            entry = extents + extent * 4
            count = tl.load(entry + 1)
            begin = tl.load(entry + 2).to(tl.int32)
            end = tl.load(entry + 6, mask=extent + 1 < last_extent, other=2147483647).to(tl.int32)
            # where the key of position 0 would lie if the extent reached there
            origin = tl.load(entry + 3) - begin
            keys_at = tl.load(entry) * kv_stride + ((2 * layer * HEADS + kv_head) * count + origin) * SIZE
            k = kv + keys_at
            v = k + HEADS * count * SIZE
            start = tl.maximum(begin, segment * share)
            if SEES:
                start = tl.maximum(start, tl.min(tl.where(here, since, high), 0))
            stop = tl.minimum(tl.minimum(end, (segment + 1) * share), high)
            whole = start + tl.maximum(tl.minimum(stop, low) - start, 0) // BLOCK_K * BLOCK_K
            for at in range(start, whole, BLOCK_K):
                offset = ((at + key) * SIZE)[:, None] + column[None, :]
                k_tile = tl.load(k + offset, mask=(column < SIZE)[None, :], other=0.0).to(queries.dtype)
                v_tile = tl.load(v + offset, mask=(column < SIZE)[None, :], other=0.0).to(queries.dtype)
                maximum, total, accumulator = attend_tile(
                    queries, k_tile, v_tile, here, scale_log2, maximum, total, accumulator, MASKED=False
                )
            for at in range(whole, stop, BLOCK_K):
                offset = ((at + key) * SIZE)[:, None] + column[None, :]
                there = (at + key < stop)[:, None] & (column < SIZE)[None, :]
                k_tile = tl.load(k + offset, mask=there, other=0.0).to(queries.dtype)
                v_tile = tl.load(v + offset, mask=there, other=0.0).to(queries.dtype)
                keep = (at + key < stop)[None, :] & (at + key[None, :] < limit[:, None])
                if SEES:
                    keep = keep & (at + key[None, :] >= since[:, None])
                maximum, total, accumulator = attend_tile(
                    queries, k_tile, v_tile, keep, scale_log2, maximum, total, accumulator, MASKED=True
                )
        if SPLIT and own:
            token = row + row_start - start_row
            partial = (begin_part + segment * window + token) * (HEADS * GROUP) + kv_head * GROUP + member
            tl.store(partials + partial.to(tl.int64)[:, None] * SIZE + column[None, :], accumulator, mask=mask)
            figures = partials + capacity.to(tl.int64) * (HEADS * GROUP * SIZE)
            tl.store(figures + partial, maximum, mask=here)
            tl.store(figures + capacity * (HEADS * GROUP) + partial, total, mask=here)
        else:
            all_maximum, all_total, all_accumulator = joined(
                all_maximum, all_total, all_accumulator, maximum, total, accumulator
            )
        segment += 1
    if not own:
        some = all_total > 0
        result = all_accumulator / tl.where(some, all_total, 1.0)[:, None]
        # y may be q: this program alone reads these rows of these heads, and has read them
        place = row.to(tl.int64)[:, None] * y_stride + ((kv_head * GROUP + member) * SIZE)[:, None] + column[None, :]
        tl.store(y + place, result.to(y.dtype.element_ty), mask=mask & some[:, None])
        if SUMS:
            line = row.to(tl.int64) * sums_stride + kv_head * GROUP + member
            tl.store(logsumexp + line, log_sum(all_maximum, all_total), mask=here & some)


@triton.jit(do_not_specialize=["rows", "row_start", "sequences", "capacity", "layer"])
def kv_attention_kernel(
    q,
    kv,
    extents,
    cu_extents,
    seen,
    cu_seqlens,
    positions,
    y,
    logsumexp,
    partials,
    q_stride,
    kv_stride,
    y_stride,
    sums_stride,
    rows,
    row_start,
    sequences,
    capacity,
    layer,
    scale_log2,
    sees,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PART: tl.constexpr,
    SIZE: tl.constexpr,
    SEEN: tl.constexpr,
    SEES: tl.constexpr,
    SPLIT: tl.constexpr,
    SUMS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT_KEYS: tl.constexpr,
    SEGMENT_TOKENS: tl.constexpr,
    ALIGNED: tl.constexpr,
    LONG: tl.constexpr,
    LONG_Q: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    tile = tl.program_id(0)
    if LONG:  # tiles of long windows are the last ones
        turned = tl.num_programs(0) - 1 - tile
        first, last, number = find_tile(
            turned, cu_seqlens, sequences, row_start, rows, LONG_Q // PART, SEQUENCES, fewest=LONG
        )
        long = last > first
        if last == first:
            first, last, number = find_tile(
                tile, cu_seqlens, sequences, row_start, rows, BLOCK_Q // PART, SEQUENCES, most=LONG - 1
            )
    else:
        first, last, number = find_tile(tile, cu_seqlens, sequences, row_start, rows, BLOCK_Q // PART, SEQUENCES)
    sequence, starts, windows, shares, counts, begins = segments_of(
        cu_seqlens, seen, sequences, capacity, SEQUENCES, SEGMENTS, SEGMENT_KEYS, SEGMENT_TOKENS, ALIGNED
    )
    keys = tl.load(seen + number)
    share = of_one(shares, sequence, number)
    segment = 0
    segments = tl.where(last > first, of_one(counts, sequence, number), 0)
    own = last < first  # whether each segment has a program of its own
    begin_part = of_one(begins, sequence, number)
    if SPLIT:
        own = begin_part >= 0
        segment = tl.program_id(2)
        segments = tl.minimum(segments, tl.where(own, segment + 1, tl.where(segment == 0, SEGMENTS, 0)))
        if segment >= segments:
            return
    window = of_one(windows, sequence, number)
    start_row = of_one(starts, sequence, number)
    first_extent = tl.load(cu_extents + number)
    last_extent = tl.load(cu_extents + number + 1)
    if LONG:  # noqa: SIM102 - without it there is no `long`
        if long:
            attend_rows(
                q, kv, extents, first_extent, last_extent, positions, y, logsumexp, partials, q_stride, kv_stride, y_stride,
                sums_stride, row_start, capacity, layer, scale_log2, sees, first, last, keys, share, segment, segments, own,
                begin_part, window, start_row, HEADS, GROUP, PART, SIZE, SEEN, SEES, SPLIT, SUMS, LONG_Q, BLOCK_K, BLOCK_H,
            )  # fmt: skip
            return
    attend_rows(
        q, kv, extents, first_extent, last_extent, positions, y, logsumexp, partials, q_stride, kv_stride, y_stride,
        sums_stride, row_start, capacity, layer, scale_log2, sees, first, last, keys, share, segment, segments, own,
        begin_part, window, start_row, HEADS, GROUP, PART, SIZE, SEEN, SEES, SPLIT, SUMS, BLOCK_Q, BLOCK_K, BLOCK_H,
    )  # fmt: skip


@triton.jit
def log_sum(maximum, total):
    """The natural logarithm of a sum of exponentials, from its maximum and total in powers of two."""
    return (maximum + tl.log2(tl.where(total > 0, total, 1.0))) * 0.6931471805599453


@triton.jit(do_not_specialize=["rows", "row_start", "sequences", "capacity"])
def join_segments_kernel(
    seen,
    cu_seqlens,
    y,
    logsumexp,
    partials,
    y_stride,
    sums_stride,
    rows,
    row_start,
    sequences,
    capacity,
    ALL_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SUMS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT_KEYS: tl.constexpr,
    SEGMENT_TOKENS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Some heads of one row: the results of all segments of its sequence, in order, into y."""
    row = tl.program_id(0)
    _, starts, windows, _, counts, begins = segments_of(
        cu_seqlens, seen, sequences, capacity, SEQUENCES, SEGMENTS, SEGMENT_KEYS, SEGMENT_TOKENS, ALIGNED
    )
    mine = (starts <= row + row_start) & (row + row_start < starts + windows)
    window = tl.sum(tl.where(mine, windows, 0), 0)
    segments = tl.sum(tl.where(mine & (begins >= 0), counts, 0), 0)
    begin = tl.sum(tl.where(mine, begins + row + row_start - starts, 0), 0)
    head = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_H)
    figures = partials + capacity.to(tl.int64) * (ALL_HEADS * SIZE)
    maximum = tl.full([BLOCK_N], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_N], tl.float32)
    accumulator = tl.zeros([BLOCK_N, BLOCK_H], tl.float32)
    for segment in tl.static_range(SEGMENTS):
        there = (segment < segments) & (head < ALL_HEADS)
        partial = (begin + segment * window) * ALL_HEADS + head
        mask = there[:, None] & (column < SIZE)[None, :]
        part = tl.load(partials + partial.to(tl.int64)[:, None] * SIZE + column[None, :], mask=mask, other=0.0)
        part_maximum = tl.load(figures + partial, mask=there, other=float("-inf"))
        part_total = tl.load(figures + capacity * ALL_HEADS + partial, mask=there, other=0.0)
        maximum, total, accumulator = joined(maximum, total, accumulator, part_maximum, part_total, part)
    sees = total > 0
    result = accumulator / tl.where(sees, total, 1.0)[:, None]
    place = row.to(tl.int64) * y_stride + head[:, None] * SIZE + column[None, :]
    tl.store(y + place, result.to(y.dtype.element_ty), mask=sees[:, None] & (column < SIZE)[None, :])
    if SUMS:
        tl.store(logsumexp + row.to(tl.int64) * sums_stride + head, log_sum(maximum, total), mask=sees)


def launch(
    *, q: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, seen: Tensor, cu_seqlens: Tensor, positions: Tensor,
    y: Tensor, sees: Tensor | None = None, layer: int, kv_heads: int, head_size: int, scale: float, span: int = 0,
    keys: int = 0, block: int = 0, parts: int = 1, row_start: int = 0, logsumexp: Tensor | None = None,
    scratch: Tensor | None = None, fixed: bool = False, large: Large | None = None,
) -> None:  # fmt: skip
    """Write the attention of the query rows into y [T, N*H]; y may be q itself.

    `logsumexp`, float32 [T, N], is for `prefix_attention`: the log-sum-exps of the rows' scores. `fixed` takes tiles that give a
    row the same bits, however many rows there are. `large` launches tiles of 128 rows, unless `sees` is given.
    """
    group = q.shape[1] // (kv_heads * head_size)
    rows, sequences, all_heads = q.shape[0], cu_seqlens.shape[0] - 1, group * kv_heads
    item = max(q.element_size(), kv.element_size())
    tile, part, tiles, heads = cut_of(q, sequences, group, kv_heads, head_size, fixed=fixed, item=item)
    room = 0 if scratch is None else scratch.numel() // (4 * all_heads * (head_size + 2))
    # rows of results, then their maxima, then their sums; a sequence sees no more keys than the state has rows
    splits = min(KV_SEGMENTS, -(-kv.shape[0] // KV_SEGMENT_KEYS)) if room > 1 else 1
    partials = floats_of("kv_attention", scratch, room * all_heads * (head_size + 2)) if splits > 1 else y
    segments = {
        "SEQUENCES": power_of_two(sequences, 1 << 16, least=SEQUENCES),
        "SEGMENTS": KV_SEGMENTS,
        "SEGMENT_KEYS": KV_SEGMENT_KEYS,
        "SEGMENT_TOKENS": KV_SEGMENT_TOKENS,
        "ALIGNED": KV_SEGMENT_ALIGNED,
    }
    constants = {**segments, "HEADS": kv_heads, "GROUP": group, "PART": part, "SIZE": head_size, "SEEN": block}
    sums = y if logsumexp is None else logsumexp
    constants |= {"SPLIT": splits > 1, "SUMS": logsumexp is not None, "BLOCK_Q": tile.rows, "BLOCK_K": tile.columns}
    long_rows = long_rows_of(q, head_size, tile, item) if sequences > 1 else 0
    sizes = (y.stride(0), sums.stride(0), rows, row_start, sequences, room, layer, scale / math.log(2))
    operands = (extents, cu_extents, seen, cu_seqlens, positions, y, sums, partials, q.stride(0))
    wide = power_of_two(head_size, 1 << 16, least=DOT_MINIMUM)
    if large is not None and tile.rows == LARGE_ROWS and sees is None:
        large((tiles, heads, splits), q, kv, operands, sizes, constants)
    else:
        kv_attention_kernel[(tiles, heads, splits)](
            q,
            kv,
            *operands,
            kv.stride(0),
            *sizes,
            positions if sees is None else sees,
            **constants,
            SEES=sees is not None,
            LONG=long_rows // part // 2 + 1 if long_rows else 0,
            LONG_Q=long_rows,
            BLOCK_H=wide,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    if splits == 1:
        return
    join_segments_kernel[(rows, -(-all_heads // JOINED_HEADS))](
        seen,
        cu_seqlens,
        y,
        sums,
        partials,
        y.stride(0),
        sums.stride(0),
        rows,
        row_start,
        sequences,
        room,
        **segments,
        ALL_HEADS=all_heads,
        SIZE=head_size,
        SUMS=logsumexp is not None,
        BLOCK_N=JOINED_HEADS,
        BLOCK_H=wide,
        num_warps=JOIN_WARPS,
    )


class Cut(NamedTuple):
    """The cut of query rows: into `tiles` tiles, whose rows are tokens times `part` heads, each for `heads` parts of heads."""

    tile: Tile
    part: int
    tiles: int
    heads: int


def cut_of(
    q: Tensor, sequences: int, group: int, heads: int, head_size: int, *, fixed: bool = False, item: int = 0
) -> Cut:  # fmt: skip
    """Cut the rows of q into as many tiles as those of the sequences may need, whatever their lengths; `group` of its heads
    share keys, and there are `heads` such groups. `fixed` takes none of the small tiles, which add up in another order. `item`
    is the bytes of an element of queries or keys, the larger; those of a query, if not given."""
    rows = q.shape[0]
    tile = tile_of(q, head_size, max(-(-rows // sequences) * group, FIXED_ROWS if fixed else 0), item)
    part = min(group, tile.rows)
    tokens = tile.rows // part
    return Cut(tile, part, (rows + sequences * (tokens - 1)) // tokens, heads * -(-group // part))


def long_rows_of(q: Tensor, head_size: int, tile: Tile, item: int) -> int:
    """Return the rows of the largest tile that a launch of this one can have as well, for windows that are much longer than the
    mean: with as many keys, warps and stages. 0 if it is the largest."""
    tiles = tiles_of(q, head_size, item)
    alike = [one.rows for one in tiles if one[1:] == tile[1:] and one.rows > tile.rows]
    return max(alike, default=0)


def tile_of(q: Tensor, head_size: int, rows: int, item: int = 0) -> Tile:
    """Choose the smallest tile that `rows` rows fit into, or the largest."""
    tiles = tiles_of(q, head_size, item)
    return next((tile for tile in tiles if tile.rows >= rows), tiles[-1])


def tiles_of(q: Tensor, head_size: int, item: int = 0) -> Tiles:
    """Return the tiles for such queries, the fewest rows first."""
    table = since(TILES, q) if head_size <= WIDEST else NARROW
    return table[max(2, min(item or q.element_size(), 4))]


launch_invariant = partial(launch, fixed=True)
