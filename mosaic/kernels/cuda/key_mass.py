"""key_mass on CUDA: the attention of each sequence's voting rows to each key of its prefix, per set of heads.

Each program owns a run of keys of a sequence, one set of heads and one tile of the block: for one tile of rows after
another, from the first voter to the last, it goes over its keys and updates their statistics. So no matrix is larger
than a tile, and no sum depends on the order in which programs run. Lengths are read on the device alone: the number of
programs depends on shapes, so a captured launch serves other lengths. Legend: T rows, R rows of the state, L layers, S
keys of all prefixes, B sequences, X extents, N query heads, K KV heads, H size.
"""

import math
import sys
from collections.abc import Mapping
from functools import partial
from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.kv_attention import WIDEST
from mosaic.kernels.cuda.shared.launching import DOT_MINIMUM, Tile, power_of_two, processors, since, tl, triton
from mosaic.kernels.cuda.shared.sequences import SEQUENCES
from mosaic.kernels.cuda.shared.voting import tile_of_voters, votes_of

RUNS: Final = 2
"""Runs of keys for each multiprocessor: over 131,008 keys 77 us with 2, 132 with 1 and 80 with 4 (H200, see HOPPER)."""
# By architecture and item size, the fewest rows first: query rows, keys, unused, warps, stages. A launch takes the first that a
# sequence's rows fit into, or else the last. On one H200, 32 queries of 32/8 heads of 128 over 131,008 keys take 77 us in tiles
# of 64 keys with 4 warps and 4 stages, 82 with 3 stages, 91 with 8 warps, 98 in tiles of 128 keys; reading them takes 62.
Tiles = tuple[Tile, ...]
FULL: Final[Tiles] = (Tile(16, 32, 0, 4, 1), Tile(32, 32, 0, 8, 1))
FEW: Final[Tiles] = (Tile(16, 64, 0, 4, 3), Tile(32, 64, 0, 4, 3))
SMALL: Final[Mapping[int, Tiles]] = {
    2: (FEW[0], Tile(32, 64, 0, 4, 2)),
    4: FULL,
}  # a third stage spills where rows have tiles
HOPPER: Final[Mapping[int, Tiles]] = {2: (*FEW, Tile(64, 64, 0, 4, 3), Tile(128, 64, 0, 4, 4)), 4: FULL}
TILES: Final = {80: SMALL, 90: HOPPER, 120: SMALL}
NARROW: Final[Mapping[int, Tiles]] = {2: (Tile(16, 32, 0, 4, 2), Tile(64, 32, 0, 8, 2)), 4: (Tile(16, 16, 0, 4, 1),)}


@triton.jit
def find_run(run, captured, sequences, programs, BLOCK_K: tl.constexpr, SEQUENCES: tl.constexpr):
    """The keys of a run: prefixes are cut into runs of equal length, at most `programs` and one more per sequence.

    The sequence, its first key and the end of its keys; all 0 beyond the last run.
    """
    sequence = tl.arange(0, SEQUENCES)
    keys = tl.load(captured + sequence, mask=sequence < sequences, other=0)
    length = tl.maximum(tl.cdiv(tl.cdiv(tl.sum(keys, 0), programs), BLOCK_K), 1) * BLOCK_K
    runs = tl.cdiv(keys, length)
    before = tl.cumsum(runs, 0) - runs
    mine = (run >= before) & (run < before + runs)
    low = tl.sum(tl.where(mine, (run - before) * length, 0), 0)
    high = tl.minimum(tl.sum(tl.where(mine, keys, 0), 0), low + length)
    return tl.sum(tl.where(mine, sequence, 0), 0), low, high


@triton.jit(do_not_specialize=["sequences", "programs", "layer"])
def key_mass_kernel(
    q,
    kv,
    extents,
    cu_extents,
    captured,
    cu_keys,
    votes,
    cu_seqlens,
    logsumexp,
    positions,
    mass,
    q_stride,
    kv_stride,
    sums_stride,
    mass_stride,
    sequences,
    programs,
    layer,
    scale_log2,
    HEADS: tl.constexpr,
    SETS: tl.constexpr,
    MEMBERS: tl.constexpr,
    PART: tl.constexpr,
    SIZE: tl.constexpr,
    STATISTIC: tl.constexpr,
    SEEN: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Mean, maximum or minimum, of a run of keys, of what all voting rows and all heads of one set give to each."""
    NOTHING: tl.constexpr = float("inf") if STATISTIC == "worst" else 0.0
    PARTS: tl.constexpr = (MEMBERS + PART - 1) // PART
    TOKENS: tl.constexpr = BLOCK_Q // PART
    own = tl.program_id(1) // TILES
    sequence, low, high = find_run(tl.program_id(0), captured, sequences, programs, BLOCK_K, SEQUENCES)
    first = tl.load(cu_seqlens + sequence)
    last = tl.load(cu_seqlens + sequence + 1)
    start = tl.load(cu_keys + sequence)
    first_extent = tl.load(cu_extents + sequence)
    last_extent = tl.load(cu_extents + sequence + 1)
    index = tl.arange(0, BLOCK_Q)
    voters = tl.zeros([BLOCK_Q], tl.int32)
    places = tl.zeros([BLOCK_Q], tl.int32) + last
    ends = tl.zeros([BLOCK_Q], tl.int32) + first
    of_tile = tile_of_voters(votes, positions, first, last, tl.program_id(1) % TILES, SEEN, ROWS, TILES, BLOCK_Q)
    for some in range(first, last, BLOCK_Q):
        voting = votes_of(votes, positions, some + index, some + index < last, of_tile, SEEN, ROWS, TILES)
        voters += voting.to(tl.int32)
        places = tl.minimum(places, tl.where(voting, some + index, last))
        ends = tl.maximum(ends, tl.where(voting, some + index + 1, first))
    number = tl.sum(voters, 0) * MEMBERS
    high = tl.where(number > 0, high, low)
    share = 1.0 / tl.maximum(number, 1).to(tl.float32)
    key = tl.arange(0, BLOCK_K)
    column = tl.arange(0, BLOCK_H)
    found_of = mass + tl.program_id(1).to(tl.int64) * mass_stride + start
    begin_tile = (tl.min(places, 0) - first) // TOKENS * PARTS  # that of the first row that votes
    for tile in range(begin_tile, tl.cdiv(tl.max(ends, 0) - first, TOKENS) * PARTS):
        row = first + tile // PARTS * TOKENS + index // PART
        member = tile % PARTS * PART + index % PART
        here = (index < TOKENS * PART) & (member < MEMBERS) & (row < last)
        says = votes_of(votes, positions, row, here, of_tile, SEEN, ROWS, TILES)
        head = own * MEMBERS + member
        place = row.to(tl.int64)[:, None] * q_stride + (head * SIZE)[:, None] + column[None, :]
        queries = tl.trans(tl.load(q + place, mask=says[:, None] & (column < SIZE)[None, :], other=0.0))
        # a row without a vote changes nothing
        silent: tl.constexpr = float("-inf") if STATISTIC == "worst" else float("inf")
        logsum = tl.load(logsumexp + row * sums_stride + head, mask=says, other=silent) * 1.4426950408889634
        tl.debug_barrier()  # what other rows have added to these keys is there
        for extent in range(first_extent, last_extent):
            entry = extents + extent * 4
            begin = tl.load(entry + 2).to(tl.int32)
            end = tl.load(entry + 6, mask=extent + 1 < last_extent, other=2147483647).to(tl.int32)
            # where the key of position 0 would lie if the extent reached there
            origin = (2 * layer * HEADS + own // (SETS // HEADS)) * tl.load(entry + 1) + tl.load(entry + 3) - begin
            k = kv + tl.load(entry) * kv_stride + origin * SIZE
            stop = tl.minimum(end, high)
            for step in range(tl.maximum(begin, low), stop, BLOCK_K):
                there = step + key < stop
                k_mask = there[:, None] & (column < SIZE)[None, :]
                k_tile = tl.load(k + ((step + key) * SIZE)[:, None] + column[None, :], mask=k_mask, other=0.0)
                # keys are the rows of the product: each of its sums lies in a few neighbouring threads
                scores = tl.dot(k_tile, queries, input_precision="ieee")
                weights = tl.exp2(scores * scale_log2 - logsum[None, :])
                found = tl.load(found_of + step + key, mask=there & (tile > begin_tile), other=NOTHING)
                if STATISTIC == "mean":
                    found += tl.sum(weights, 1) * share
                elif STATISTIC == "max":
                    found = tl.maximum(found, tl.max(weights, 1))
                else:
                    found = tl.minimum(found, tl.min(weights, 1))
                tl.store(found_of + step + key, found, mask=there)


def launch(
    *, q: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, captured: Tensor, cu_keys: Tensor, votes: Tensor,
    cu_seqlens: Tensor, logsumexp: Tensor, mass: Tensor, positions: Tensor | None = None, layer: int, kv_heads: int,
    head_size: int, scale: float, sets: int, columns: int = 0, span: int = 0, statistic: str = "mean", block: int = 0,
    rows: int = 0, tiles: int = 1, fixed: bool = False, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the mass of the keys of each prefix into mass [sets * tiles, S].

    If `fixed`, the tile is the same whatever the number of rows.
    """
    members = q.shape[1] // (sets * head_size)
    sequences = cu_seqlens.shape[0] - 1
    tile = tile_of(q, head_size, sys.maxsize if fixed else -(-q.shape[0] // sequences) * members)
    programs = max(1, processors(q.device) * RUNS // (sets * tiles))
    runs = min(programs, -(-mass.shape[1] // tile.columns)) + sequences
    key_mass_kernel[(runs, sets * tiles)](
        q,
        kv,
        extents,
        cu_extents,
        captured,
        cu_keys,
        votes,
        cu_seqlens,
        logsumexp,
        cu_seqlens if positions is None else positions,
        mass,
        q.stride(0),
        kv.stride(0),
        logsumexp.stride(0),
        mass.stride(0),
        sequences,
        programs,
        layer,
        scale / math.log(2),
        HEADS=kv_heads,
        SIZE=head_size,
        SEQUENCES=power_of_two(sequences, 1 << 16, least=SEQUENCES),
        BLOCK_H=power_of_two(head_size, 1 << 16, least=DOT_MINIMUM),
        SETS=sets,
        MEMBERS=members,
        PART=min(members, tile.rows),
        STATISTIC=statistic,
        SEEN=block,
        ROWS=rows,
        TILES=tiles,
        BLOCK_Q=tile.rows,
        BLOCK_K=tile.columns,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def tile_of(q: Tensor, head_size: int, rows: int) -> Tile:
    """Choose the smallest tile that `rows` rows fit into, or the largest."""
    table = since(TILES, q) if head_size <= WIDEST else NARROW
    tiles = table[max(2, min(q.element_size(), 4))]
    return next((tile for tile in tiles if tile.rows >= rows), tiles[-1])


launch_invariant = partial(launch, fixed=True)
