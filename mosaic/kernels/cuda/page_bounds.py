"""page_bounds on CUDA: how much attention the voting rows of each sequence can give to the keys of each page, at most.

Contract: page_bounds(q[T, N*H], extrema[E, Z*2*K*H], page_table[M] int64, cu_pages[B+1] int32, votes[T] uint8,
cu_seqlens[B+1] int32; slot, kv_heads, head_size, sets, columns, page_span, statistic) -> bound[sets, S] float32, all whole, as
`mosaic.registrar.operators.page_bounds` says (Quest, section 3). A program owns a tile of the pages of a sequence and one set of
heads, and goes over the voting rows. For the mean it adds up what of the queries is above 0 and below, and multiplies once; for
an extreme it multiplies each tile of rows. So no matrix is larger than a tile, and a sequence's bounds depend on no other
sequence.
Legend: T rows, E rows of pages, Z sparse layers, M pages, S columns, B sequences, N query heads, K KV heads, H size.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import DOT_MINIMUM, power_of_two, tl, triton
from mosaic.kernels.cuda.shared.sequences import SEQUENCES, find_tile
from mosaic.kernels.page_bounds import check, reference

__all__ = ["launch", "reference"]

# Untuned defaults.
ROWS: Final = 16
"""Rows times heads of a tile."""
PAGES: Final = 64
"""Pages of a tile of up to 256 bytes each; of wider ones there are 16."""
WARPS: Final = 4


@triton.jit(do_not_specialize=["pages", "sequences", "slot"])
def page_bounds_kernel(
    q,
    extrema,
    page_table,
    cu_pages,
    votes,
    cu_seqlens,
    bound,
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
    STATISTIC: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    own = tl.program_id(1)
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
    start = tl.load(cu_seqlens + sequence)
    count = (tl.load(cu_seqlens + sequence + 1) - start) * MEMBERS
    SILENT: tl.constexpr = float("inf") if STATISTIC == "worst" else float("-inf")
    found = tl.full([BLOCK_P], SILENT, tl.float32)
    positive = tl.zeros([BLOCK_H], tl.float32)
    negative = tl.zeros([BLOCK_H], tl.float32)
    voters = 0
    for tile in range(0, tl.where(last > first, count, 0), BLOCK_Q):
        index = tile + tl.arange(0, BLOCK_Q)
        row = start + index // MEMBERS
        says = tl.load(votes + row, mask=index < count, other=0) != 0
        voters += tl.sum(says.to(tl.int32), 0)
        x = (
            q
            + row.to(tl.int64)[:, None] * q_stride
            + ((own * MEMBERS + index % MEMBERS) * SIZE)[:, None]
            + column[None, :]
        )
        queries = tl.load(x, mask=says[:, None] & within[None, :], other=0.0)
        over = tl.maximum(queries.to(tl.float32), 0.0)
        under = tl.minimum(queries.to(tl.float32), 0.0)
        if STATISTIC == "mean":
            positive += tl.sum(over, 0)
            negative += tl.sum(under, 0)
        else:
            scores = tl.dot(largest, tl.trans(over.to(queries.dtype)), input_precision="ieee")
            scores = tl.dot(least, tl.trans(under.to(queries.dtype)), scores, input_precision="ieee")
            scores = tl.where(says[None, :], scores, SILENT)
            found = tl.maximum(found, tl.max(scores, 1)) if STATISTIC == "max" else tl.minimum(found, tl.min(scores, 1))
    if STATISTIC == "mean":
        products = largest.to(tl.float32) * positive[None, :] + least.to(tl.float32) * negative[None, :]
        found = tl.sum(products, 1) / tl.maximum(voters, 1).to(tl.float32)
    found = tl.where(voters > 0, found, 0.0)
    found = (1.0 + tl.maximum(found, 0.0)) / (1.0 + tl.maximum(-found, 0.0))
    tl.store(bound + own.to(tl.int64) * bound_stride + at, found, mask=here & (voters > 0))


def launch(
    *,
    q: Tensor,
    extrema: Tensor,
    page_table: Tensor,
    cu_pages: Tensor,
    votes: Tensor,
    cu_seqlens: Tensor,
    bound: Tensor,
    slot: int,
    kv_heads: int,
    head_size: int,
    sets: int,
    columns: int = 0,
    page_span: int = 0,
    statistic: str = "mean",
    scratch: Tensor | None = None,
) -> None:
    """Write the bounds of pages into bound [sets, S]."""
    members = check(
        q, extrema, page_table, cu_pages, votes, cu_seqlens, bound, slot, kv_heads, head_size, sets, statistic
    )
    sequences, block_h = cu_seqlens.shape[0] - 1, power_of_two(head_size, 1 << 16, least=DOT_MINIMUM)
    pages = PAGES if block_h * q.element_size() <= 256 else DOT_MINIMUM
    columns = min(bound.shape[1], page_table.shape[0])
    page_bounds_kernel[(triton.cdiv(columns, pages) + sequences - 1, sets)](
        q,
        extrema,
        page_table,
        cu_pages,
        votes,
        cu_seqlens,
        bound,
        q.stride(0),
        extrema.stride(0),
        bound.stride(0),
        columns,
        sequences,
        slot,
        HEADS=kv_heads,
        SIZE=head_size,
        SETS=sets,
        MEMBERS=members,
        STATISTIC=statistic,
        SEQUENCES=power_of_two(sequences, 1 << 16, least=SEQUENCES),
        BLOCK_Q=ROWS,
        BLOCK_P=pages,
        BLOCK_H=block_h,
        num_warps=WARPS,
    )
