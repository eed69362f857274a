"""page_extrema on CUDA: elementwise minimum and maximum of the keys of pages, into the rows of a state.

There are programs for as many pages as the step's tokens may complete, and for each head; they loop if there are more
pages. Legend: R rows of keys, L layers, B sequences, X extents, M pages, E rows of pages, Z sparse layers, K KV heads,
H size.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import power_of_two, tl, triton
from mosaic.kernels.cuda.shared.sequences import SEQUENCES

# Untuned defaults.
KEYS: Final = 16
"""Most keys that a program reads at a time."""
WARPS: Final = 2


@triton.jit(do_not_specialize=["sequences", "layer", "slot"])
def page_extrema_kernel(
    kv,
    extents,
    cu_extents,
    page_table,
    cu_pages,
    first_page,
    extrema,
    kv_stride,
    extrema_stride,
    sequences,
    layer,
    slot,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK_H)
    key = tl.arange(0, BLOCK_K)
    within = column < SIZE
    # the pages of all sequences that are written, side by side
    every = tl.arange(0, SEQUENCES)
    known = every < sequences
    starts = tl.load(cu_pages + every, mask=known, other=0)
    firsts = tl.load(first_page + every, mask=known, other=0)
    written = tl.maximum(tl.load(cu_pages + every + 1, mask=known, other=0) - starts - firsts, 0)
    before = tl.cumsum(written, 0) - written
    for page in range(tl.program_id(0), tl.sum(written, 0), tl.num_programs(0)):
        mine = (page >= before) & (page < before + written)
        sequence = tl.sum(tl.where(mine, every, 0), 0)
        number = tl.sum(tl.where(mine, firsts + page - before, 0), 0)
        at = tl.sum(tl.where(mine, starts, 0), 0) + number
        least = tl.full([BLOCK_H], float("inf"), tl.float32)
        largest = tl.full([BLOCK_H], float("-inf"), tl.float32)
        last_extent = tl.load(cu_extents + sequence + 1)
        for extent in range(tl.load(cu_extents + sequence), last_extent):
            entry = extents + extent * 4
            begin = tl.load(entry + 2).to(tl.int32)
            stop = tl.load(entry + 6, mask=extent + 1 < last_extent, other=2147483647).to(tl.int32)
            stop = tl.minimum(stop, (number + 1) * PAGE)
            # where the key of position 0 would lie if the extent reached there
            origin = (2 * layer * HEADS + head) * tl.load(entry + 1) + tl.load(entry + 3) - begin
            k = kv + tl.load(entry) * kv_stride + origin * SIZE
            for step in range(tl.maximum(begin, number * PAGE), stop, BLOCK_K):
                mask = (step + key < stop)[:, None] & within[None, :]
                place = k + ((step + key) * SIZE)[:, None] + column[None, :]
                keys = tl.load(place, mask=mask, other=0.0).to(tl.float32)
                least = tl.minimum(least, tl.min(tl.where(mask, keys, float("inf")), 0))
                largest = tl.maximum(largest, tl.max(tl.where(mask, keys, float("-inf")), 0))
        row = extrema + tl.load(page_table + at) * extrema_stride + (2 * slot * HEADS + head) * SIZE
        tl.store(row + column, least.to(extrema.dtype.element_ty), mask=within)
        tl.store(row + HEADS * SIZE + column, largest.to(extrema.dtype.element_ty), mask=within)


def launch(
    *, kv: Tensor, extents: Tensor, cu_extents: Tensor, page_table: Tensor, cu_pages: Tensor, first_page: Tensor,
    extrema: Tensor, layer: int, slot: int, page: int, kv_heads: int, head_size: int, tokens: int = 0,
    scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the extrema of pages into their rows of extrema [E, Z*2*K*H]."""
    sequences = cu_pages.shape[0] - 1
    programs = min(page_table.shape[0], tokens // page + sequences)
    page_extrema_kernel[(programs, kv_heads)](
        kv,
        extents,
        cu_extents,
        page_table,
        cu_pages,
        first_page,
        extrema,
        kv.stride(0),
        extrema.stride(0),
        sequences,
        layer,
        slot,
        HEADS=kv_heads,
        SIZE=head_size,
        PAGE=page,
        SEQUENCES=power_of_two(sequences, 1 << 16, least=SEQUENCES),
        BLOCK_K=power_of_two(page, KEYS),
        BLOCK_H=power_of_two(head_size, 1 << 16),
        num_warps=WARPS,
    )
