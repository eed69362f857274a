"""page_bounds on CUDA: an upper bound of the attention of each sequence's voting rows to the keys of each page.

A program owns a tile of the pages of a sequence, one set of heads and one tile of the block's rows. The mean over
queries is linear in their positive and negative parts: a first launch adds these up, once per sequence and set, and a
second multiplies the sums with the pages. For the largest and the least the program goes over the voting rows and
multiplies each tile of them. So no matrix is larger than a tile, and a sequence's bounds depend on no other sequence.
Legend: T rows, E rows of pages, Z sparse layers, M pages, S columns, B sequences, N query heads, K KV heads, H size.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import DOT_MINIMUM, power_of_two, tl, triton
from mosaic.kernels.cuda.shared.scratch import floats_of
from mosaic.kernels.cuda.shared.sequences import SEQUENCES, find_tile
from mosaic.kernels.cuda.shared.voting import tile_of_voters, votes_of

# Untuned defaults.
ROWS: Final = 16
"""Rows times heads of a tile that is multiplied."""
ROWS_ADDED: Final = 32
"""Rows times heads of a tile that is added up."""
PAGES: Final = 64
"""Pages of a tile of up to 256 bytes each; of wider ones there are 16."""
WARPS: Final = 4


@triton.jit
def queries_of(
    q,
    votes,
    positions,
    start,
    tile,
    count,
    own,
    of_tile,
    q_stride,
    SIZE: tl.constexpr,
    MEMBERS: tl.constexpr,
    SEEN: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Some rows and heads of a sequence and set, 0 where a row does not vote, and whether it does."""
    index = tile + tl.arange(0, BLOCK_Q)
    row = start + index // MEMBERS
    column = tl.arange(0, BLOCK_H)
    says = votes_of(votes, positions, row, index < count, of_tile, SEEN, ROWS, TILES)
    head = own * MEMBERS + index % MEMBERS
    place = q + row.to(tl.int64)[:, None] * q_stride + (head * SIZE)[:, None] + column[None, :]
    return tl.load(place, mask=says[:, None] & (column < SIZE)[None, :], other=0.0), says


@triton.jit
def query_sums_kernel(
    q,
    votes,
    positions,
    cu_seqlens,
    sums,
    q_stride,
    SIZE: tl.constexpr,
    SETS: tl.constexpr,
    MEMBERS: tl.constexpr,
    SEEN: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """The sums of the positive and negative parts of a sequence and set's voting queries, and their number."""
    sequence = tl.program_id(0)
    own = tl.program_id(1) // TILES
    start = tl.load(cu_seqlens + sequence)
    last = tl.load(cu_seqlens + sequence + 1)
    count = (last - start) * MEMBERS
    of_tile = tile_of_voters(votes, positions, start, last, tl.program_id(1) % TILES, SEEN, ROWS, TILES, BLOCK_Q)
    positive = tl.zeros([BLOCK_Q, BLOCK_H], tl.float32)
    negative = tl.zeros([BLOCK_Q, BLOCK_H], tl.float32)
    voters = tl.zeros([BLOCK_Q], tl.int32)
    for tile in range(0, count, BLOCK_Q):
        queries, says = queries_of(
            q, votes, positions, start, tile, count, own, of_tile, q_stride, SIZE, MEMBERS, SEEN, ROWS, TILES, BLOCK_Q, BLOCK_H
        )  # fmt: skip
        positive += tl.maximum(queries.to(tl.float32), 0.0)
        negative += tl.minimum(queries.to(tl.float32), 0.0)
        voters += says.to(tl.int32)
    column = tl.arange(0, BLOCK_H)
    place = sums + (sequence * SETS * TILES + tl.program_id(1)) * (2 * SIZE + 1)
    tl.store(place + column, tl.sum(positive, 0), mask=column < SIZE)
    tl.store(place + SIZE + column, tl.sum(negative, 0), mask=column < SIZE)
    tl.store(place + 2 * SIZE, tl.sum(voters, 0).to(tl.float32))


@triton.jit(do_not_specialize=["pages", "sequences", "slot"])
def page_bounds_kernel(
    q,
    extrema,
    page_table,
    cu_pages,
    votes,
    positions,
    cu_seqlens,
    bound,
    sums,
    q_stride,
    extrema_stride,
    bound_stride,
    pages,
    sequences,
    slot,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SETS: tl.constexpr,
    MEMBERS: tl.constexpr,
    SEEN: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    STATISTIC: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Bounds of a tile of the pages of a sequence, for one set."""
    own = tl.program_id(1) // TILES
    first, last, sequence = find_tile(tl.program_id(0), cu_pages, sequences, 0, pages, BLOCK_P, SEQUENCES)
    at = first + tl.arange(0, BLOCK_P)
    here = at < last
    column = tl.arange(0, BLOCK_H)
    within = column < SIZE
    rows = tl.load(page_table + at, mask=here, other=0) * extrema_stride
    place = extrema + rows[:, None] + (2 * slot * HEADS + own // (SETS // HEADS)) * SIZE + column[None, :]
    mask = here[:, None] & within[None, :]
    least = tl.load(place, mask=mask, other=0.0)
    largest = tl.load(place + HEADS * SIZE, mask=mask, other=0.0)
    if STATISTIC == "mean":
        mine = sums + (sequence * SETS * TILES + tl.program_id(1)) * (2 * SIZE + 1)
        positive = tl.load(mine + column, mask=within, other=0.0)
        negative = tl.load(mine + SIZE + column, mask=within, other=0.0)
        voters = tl.load(mine + 2 * SIZE).to(tl.int32)
        products = largest.to(tl.float32) * positive[None, :] + least.to(tl.float32) * negative[None, :]
        found = tl.sum(products, 1) / tl.maximum(voters, 1).to(tl.float32)
    else:
        SILENT: tl.constexpr = float("inf") if STATISTIC == "worst" else float("-inf")
        found = tl.full([BLOCK_P], SILENT, tl.float32)
        voters = 0
        start = tl.load(cu_seqlens + sequence)
        stop = tl.load(cu_seqlens + sequence + 1)
        count = (stop - start) * MEMBERS
        of_tile = tile_of_voters(votes, positions, start, stop, tl.program_id(1) % TILES, SEEN, ROWS, TILES, BLOCK_Q)
        for tile in range(0, tl.where(last > first, count, 0), BLOCK_Q):
            queries, says = queries_of(
                q, votes, positions, start, tile, count, own, of_tile, q_stride, SIZE, MEMBERS, SEEN, ROWS, TILES, BLOCK_Q, BLOCK_H
            )  # fmt: skip
            voters += tl.sum(says.to(tl.int32), 0)
            over = tl.maximum(queries.to(tl.float32), 0.0).to(queries.dtype)
            under = tl.minimum(queries.to(tl.float32), 0.0).to(queries.dtype)
            scores = tl.dot(largest, tl.trans(over), input_precision="ieee")
            scores = tl.dot(least, tl.trans(under), scores, input_precision="ieee")
            scores = tl.where(says[None, :], scores, SILENT)
            found = tl.maximum(found, tl.max(scores, 1)) if STATISTIC == "max" else tl.minimum(found, tl.min(scores, 1))
    found = tl.where(voters > 0, found, 0.0)
    found = (1.0 + tl.maximum(found, 0.0)) / (1.0 + tl.maximum(-found, 0.0))
    tl.store(bound + tl.program_id(1).to(tl.int64) * bound_stride + at, found, mask=here & (voters > 0))


def launch(
    *, q: Tensor, extrema: Tensor, page_table: Tensor, cu_pages: Tensor, votes: Tensor, cu_seqlens: Tensor,
    bound: Tensor, positions: Tensor | None = None, slot: int, kv_heads: int, head_size: int, sets: int,
    columns: int = 0, page_span: int = 0, statistic: str = "mean", block: int = 0, rows: int = 0, tiles: int = 1,
    scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the bounds of pages into bound [sets * tiles, S]."""
    members = q.shape[1] // (sets * head_size)
    sequences, block_h = cu_seqlens.shape[0] - 1, power_of_two(head_size, 1 << 16, least=DOT_MINIMUM)
    pages = PAGES if block_h * q.element_size() <= 256 else DOT_MINIMUM
    columns = min(bound.shape[1], page_table.shape[0])
    where, sums = cu_seqlens if positions is None else positions, bound
    queries = {"SIZE": head_size, "SETS": sets, "MEMBERS": members, "BLOCK_H": block_h}
    queries |= {"SEEN": block, "ROWS": rows, "TILES": tiles}
    if statistic == "mean":
        sums = floats_of("page_bounds", scratch, sequences * sets * tiles * (2 * head_size + 1))
        query_sums_kernel[(sequences, sets * tiles)](
            q, votes, where, cu_seqlens, sums, q.stride(0), **queries, BLOCK_Q=ROWS_ADDED, num_warps=WARPS
        )
    page_bounds_kernel[(triton.cdiv(columns, pages) + sequences - 1, sets * tiles)](
        q,
        extrema,
        page_table,
        cu_pages,
        votes,
        where,
        cu_seqlens,
        bound,
        sums,
        q.stride(0),
        extrema.stride(0),
        bound.stride(0),
        columns,
        sequences,
        slot,
        **queries,
        HEADS=kv_heads,
        STATISTIC=statistic,
        SEQUENCES=power_of_two(sequences, 1 << 16, least=SEQUENCES),
        BLOCK_Q=ROWS,
        BLOCK_P=pages,
        num_warps=WARPS,
    )
