"""key_mass on CUDA: how much attention the voting rows of each sequence give to each key of its prefix, per set of heads.

Contract: key_mass(q[T, N*H], kv[R, L*2*K*H], extents[X, 4] int64, cu_extents[B+1] int32, captured[B] int32, cu_keys[B+1] int32,
votes[T] uint8, cu_seqlens[B+1] int32; layer, kv_heads, head_size, scale, sets, columns, span, statistic) -> mass[sets, S] float32,
all whole, as `mosaic.registrar.operators.key_mass` says (MAGE, equation 3). First the log-sum-exp of every row and head over its
prefix goes into scratch; where the tiles are few, it is split over keys and then joined. Then each program owns some keys of a
sequence and one set of heads: it goes over all voting rows and writes the statistic of its keys. So no matrix is larger than a
tile, and no sum depends on the order in which programs run. Lengths are read on the device alone: how many programs start
depends on shapes, so a captured launch serves other lengths.
Legend: T rows, R rows of the state, L layers, S keys of all prefixes, B sequences, X extents, N query heads, K KV heads, H size.
"""

from __future__ import annotations

import math
from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.kv_attention import SEQUENCES, cut_of, find_tile, floats_of, share_of, tile_of
from mosaic.kernels.cuda.shared.launching import DOT_MINIMUM, power_of_two, processors, tl, triton
from mosaic.kernels.key_mass import check, reference
from mosaic.registrar.operators.key_mass import SPLIT_KEYS, splits_of

__all__ = ["launch", "reference"]

PLACES: Final = 2
"""Programs that a multiprocessor runs at a time."""
JOINED: Final = 256
"""Log-sum-exps that a program joins the splits of."""
JOIN_WARPS: Final = 4


@triton.jit
def places_of(
    position, valid, extents, first, last, kv_stride, layer, kv_head, HEADS: tl.constexpr, SIZE: tl.constexpr
):
    """Where the keys of some positions begin, in elements of kv; 0 where not `valid`. Extents are `first` to `last`."""
    place = tl.zeros_like(position).to(tl.int64)
    for extent in range(first, last):
        entry = extents + extent * 4
        begin = tl.load(entry + 2)
        # where the key of position 0 would lie, were the extent to reach there
        origin = (2 * layer * HEADS + kv_head) * tl.load(entry + 1) + tl.load(entry + 3) - begin
        mine = valid & (position >= begin)
        place = tl.where(mine, tl.load(entry) * kv_stride + (origin + position) * SIZE, place)
    return place


@triton.jit(do_not_specialize=["rows", "sequences", "splits", "layer"])
def log_sum_kernel(
    q,
    kv,
    extents,
    cu_extents,
    captured,
    votes,
    cu_seqlens,
    sums,
    q_stride,
    kv_stride,
    rows,
    sequences,
    splits,
    layer,
    scale_log2,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PART: tl.constexpr,
    SIZE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Log2-sum-exp2 of the scores of a tile's voting rows with one split of their prefix; -inf where that has no key."""
    PARTS: tl.constexpr = (GROUP + PART - 1) // PART
    TOKENS: tl.constexpr = BLOCK_Q // PART
    kv_head = tl.program_id(1) // PARTS
    first, last, sequence = find_tile(tl.program_id(0), cu_seqlens, sequences, 0, rows, TOKENS, SEQUENCES)
    index = tl.arange(0, BLOCK_Q)
    row = first + index // PART
    member = tl.program_id(1) % PARTS * PART + index % PART
    here = (index < TOKENS * PART) & (member < GROUP) & (row < last)
    says = tl.load(votes + row, mask=here, other=0) != 0
    keys = tl.where(tl.max(says.to(tl.int32), 0) > 0, tl.load(captured + sequence), 0)
    low = tl.program_id(2) * share_of(keys, splits, BLOCK_K, LEAST)
    high = tl.minimum(keys, low + share_of(keys, splits, BLOCK_K, LEAST))
    column = tl.arange(0, BLOCK_H)
    head = kv_head * GROUP + member
    place = row.to(tl.int64)[:, None] * q_stride + (head * SIZE)[:, None] + column[None, :]
    queries = tl.load(q + place, mask=says[:, None] & (column < SIZE)[None, :], other=0.0)
    key = tl.arange(0, BLOCK_K)
    maximum = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    last_extent = tl.load(cu_extents + sequence + 1)
    for extent in range(tl.load(cu_extents + sequence), last_extent):
        entry = extents + extent * 4
        begin = tl.load(entry + 2).to(tl.int32)
        end = tl.load(entry + 6, mask=extent + 1 < last_extent, other=2147483647).to(tl.int32)
        # where the key of position 0 would lie, were the extent to reach there
        origin = (2 * layer * HEADS + kv_head) * tl.load(entry + 1) + tl.load(entry + 3) - begin
        k = kv + tl.load(entry) * kv_stride + origin * SIZE
        stop = tl.minimum(end, high)
        for step in range(tl.maximum(begin, low), stop, BLOCK_K):
            there = step + key < stop
            k_mask = there[None, :] & (column < SIZE)[:, None]
            k_tile = tl.load(k + ((step + key) * SIZE)[None, :] + column[:, None], mask=k_mask, other=0.0)
            scores = tl.dot(queries, k_tile, input_precision="ieee") * scale_log2
            scores = tl.where(there[None, :], scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, 1))  # a key is there, so it is finite
            total = total * tl.exp2(maximum - new_maximum) + tl.sum(tl.exp2(scores - new_maximum[:, None]), 1)
            maximum = new_maximum
    place = (tl.program_id(2) * rows + row) * (HEADS * GROUP) + head
    tl.store(sums + place, maximum + tl.log2(tl.where(total > 0.0, total, 1.0)), mask=here)


@triton.jit(do_not_specialize=["count", "splits"])
def join_sums_kernel(sums, count, splits, BLOCK: tl.constexpr):
    """Log2-sum-exp2 of all splits, in place of that of the first."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    maximum = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(0, splits):
        some = tl.load(sums + split * count + at, mask=at < count, other=float("-inf"))
        new_maximum = tl.maximum(maximum, some)
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        total = total * tl.exp2(maximum - base) + tl.exp2(some - base)
        maximum = new_maximum
    tl.store(sums + at, maximum + tl.log2(tl.where(total > 0.0, total, 1.0)), mask=at < count)


@triton.jit(do_not_specialize=["sequences", "columns", "layer"])
def key_mass_kernel(
    q,
    kv,
    extents,
    cu_extents,
    captured,
    cu_keys,
    votes,
    cu_seqlens,
    sums,
    mass,
    q_stride,
    kv_stride,
    mass_stride,
    sequences,
    columns,
    layer,
    scale_log2,
    HEADS: tl.constexpr,
    SETS: tl.constexpr,
    MEMBERS: tl.constexpr,
    PART: tl.constexpr,
    SIZE: tl.constexpr,
    MEAN: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Mean or maximum, of some keys, of what all voting rows and all heads of one set give to each."""
    PARTS: tl.constexpr = (MEMBERS + PART - 1) // PART
    TOKENS: tl.constexpr = BLOCK_Q // PART
    own = tl.program_id(1)
    first, last, sequence = find_tile(tl.program_id(0), cu_keys, sequences, 0, columns, BLOCK_K, SEQUENCES)
    start = tl.load(cu_keys + sequence)
    key = first + tl.arange(0, BLOCK_K)
    there = key < tl.minimum(last, start + tl.load(captured + sequence))
    any_there = tl.max(there.to(tl.int32), 0) > 0
    extent = tl.load(cu_extents + sequence)
    last_extent = tl.where(any_there, tl.load(cu_extents + sequence + 1), extent)
    kv_head = own // (SETS // HEADS)
    place = places_of(key - start, there, extents, extent, last_extent, kv_stride, layer, kv_head, HEADS, SIZE)
    column = tl.arange(0, BLOCK_H)
    k_mask = there[None, :] & (column < SIZE)[:, None]
    k_tile = tl.load(kv + place[None, :] + column[:, None], mask=k_mask, other=0.0)
    index = tl.arange(0, BLOCK_Q)
    found = tl.zeros([BLOCK_K], tl.float32)
    voters = tl.zeros([BLOCK_Q], tl.int32)
    first_row = tl.load(cu_seqlens + sequence)
    last_row = tl.where(any_there, tl.load(cu_seqlens + sequence + 1), first_row)
    for step in range(first_row, last_row, TOKENS):
        for part in tl.static_range(PARTS):
            row = step + index // PART
            member = part * PART + index % PART
            here = (index < TOKENS * PART) & (member < MEMBERS) & (row < last_row)
            says = here & (tl.load(votes + row, mask=here, other=0) != 0)
            head = own * MEMBERS + member
            where = row.to(tl.int64)[:, None] * q_stride + (head * SIZE)[:, None] + column[None, :]
            queries = tl.load(q + where, mask=says[:, None] & (column < SIZE)[None, :], other=0.0)
            # a row without a vote weighs nothing
            logsum = tl.load(sums + row * (SETS * MEMBERS) + head, mask=says, other=float("inf"))
            scores = tl.dot(queries, k_tile, input_precision="ieee") * scale_log2
            weights = tl.exp2(scores - logsum[:, None])
            if MEAN:
                found += tl.sum(weights, 0)
            else:
                found = tl.maximum(found, tl.max(weights, 0))
            voters += says.to(tl.int32)
    number = tl.sum(voters, 0)
    if MEAN:
        found = found / tl.maximum(number, 1).to(tl.float32)
    tl.store(mass + own.to(tl.int64) * mass_stride + key, found, mask=there & (number > 0))


def launch(
    *,
    q: Tensor,
    kv: Tensor,
    extents: Tensor,
    cu_extents: Tensor,
    captured: Tensor,
    cu_keys: Tensor,
    votes: Tensor,
    cu_seqlens: Tensor,
    mass: Tensor,
    layer: int,
    kv_heads: int,
    head_size: int,
    scale: float,
    sets: int,
    columns: int = 0,
    span: int = 0,
    statistic: str = "mean",
    scratch: Tensor | None = None,
) -> None:
    """Write the mass of the keys of each prefix into mass [sets, S]."""
    members = check(
        q, kv, extents, cu_extents, captured, cu_keys, votes, cu_seqlens, mass, layer, kv_heads, head_size, sets, statistic
    )  # fmt: skip
    rows, sequences, group = q.shape[0], cu_seqlens.shape[0] - 1, members * sets // kv_heads
    tile, part, tiles, heads = cut_of(q, sequences, group, kv_heads, head_size)
    splits = splits_of(tiles * heads, rows * members * sets, mass.shape[1], processors(q.device) * PLACES)
    sums = floats_of("key_mass", scratch, splits * rows * members * sets)
    shared = {
        "HEADS": kv_heads,
        "SIZE": head_size,
        "SEQUENCES": power_of_two(sequences, 1 << 16, least=SEQUENCES),
        "BLOCK_H": power_of_two(head_size, 1 << 16, least=DOT_MINIMUM),
    }
    log_sum_kernel[(tiles, heads, splits)](
        q,
        kv,
        extents,
        cu_extents,
        captured,
        votes,
        cu_seqlens,
        sums,
        q.stride(0),
        kv.stride(0),
        rows,
        sequences,
        splits,
        layer,
        scale / math.log(2),
        **shared,
        GROUP=group,
        PART=part,
        LEAST=SPLIT_KEYS,
        BLOCK_Q=tile.rows,
        BLOCK_K=tile.columns,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        count = rows * members * sets
        join_sums_kernel[(triton.cdiv(count, JOINED),)](sums, count, splits, BLOCK=JOINED, num_warps=JOIN_WARPS)
    tile = tile_of(q, head_size, -(-rows // sequences) * members)
    tiles = (mass.shape[1] + sequences * (tile.columns - 1)) // tile.columns
    key_mass_kernel[(tiles, sets)](
        q,
        kv,
        extents,
        cu_extents,
        captured,
        cu_keys,
        votes,
        cu_seqlens,
        sums,
        mass,
        q.stride(0),
        kv.stride(0),
        mass.stride(0),
        sequences,
        mass.shape[1],
        layer,
        scale / math.log(2),
        **shared,
        SETS=sets,
        MEMBERS=members,
        PART=min(members, tile.rows),
        MEAN=statistic == "mean",
        BLOCK_Q=tile.rows,
        BLOCK_K=tile.columns,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
