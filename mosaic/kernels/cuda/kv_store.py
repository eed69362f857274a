"""kv_store on CUDA: keys and values of a window of tokens into the rows that their sequences own, in one launch.

Row r of k is row `row_start + r` of the packed window, a token of the sequence that has it;
`mosaic.registrar.operators.kv_store` describes the layout of keys. A token in no sequence, or at a position without a
row, is not stored. kv overlaps no other operand. Legend: T tokens, R rows, L layers, W width of keys, B sequences, X
extents.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import power_of_two, tl, triton
from mosaic.kernels.cuda.shared.sequences import SEQUENCES

# Untuned defaults: 8 elements of k and of v a thread.
COLUMNS: Final = 1024
WARPS: Final = 4


@triton.jit
def place_of(row, extents, cu_extents, cu_seqlens, positions, sequences, row_start, SEQUENCES: tl.constexpr):
    """Where a row's key lies: the first row of its extent, the rows of that, and its token there, below 0 where it has none."""
    sequence = tl.arange(0, SEQUENCES)
    known = sequence < sequences
    first = tl.load(cu_seqlens + sequence, mask=known, other=0)
    end = tl.load(cu_seqlens + sequence + 1, mask=known, other=0)
    mine = known & (first <= row_start + row) & (row_start + row < end)
    low = tl.sum(tl.where(mine, tl.load(cu_extents + sequence, mask=known, other=0), 0), 0)
    high = tl.sum(tl.where(mine, tl.load(cu_extents + sequence + 1, mask=known, other=0), 0), 0)
    # the last extent that begins before the position; if it has no row for it, no extent has
    position = tl.load(positions + row).to(tl.int64)
    base = position * 0
    count = base
    token = base - 1
    for extent in range(low, high):
        entry = extents + extent * 4
        rows = tl.load(entry + 1)
        at = position - tl.load(entry + 2) + tl.load(entry + 3)
        begun = position >= tl.load(entry + 2)
        base = tl.where(begun, tl.load(entry), base)
        count = tl.where(begun, rows, count)
        token = tl.where(begun, tl.where(at < rows, at, -1), token)
    return base, count, token


@triton.jit(do_not_specialize=["sequences", "row_start", "layer"])
def kv_store_kernel(
    k,
    v,
    kv,
    extents,
    cu_extents,
    cu_seqlens,
    positions,
    k_stride,
    v_stride,
    kv_stride,
    width,
    sequences,
    row_start,
    layer,
    SIZE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    base, count, token = place_of(row, extents, cu_extents, cu_seqlens, positions, sequences, row_start, SEQUENCES)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (column < width) & (token >= 0)
    keys = tl.load(k + row.to(tl.int64) * k_stride + column, mask=mask)
    values = tl.load(v + row.to(tl.int64) * v_stride + column, mask=mask)
    place = kv + base * kv_stride + (2 * layer * width + column // SIZE * SIZE) * count + token * SIZE + column % SIZE
    tl.store(place, keys.to(kv.dtype.element_ty), mask=mask)
    tl.store(place + width * count, values.to(kv.dtype.element_ty), mask=mask)


def launch(
    *, k: Tensor, v: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, cu_seqlens: Tensor, positions: Tensor,
    layer: int, head_size: int, row_start: int = 0, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Update kv."""
    (tokens, width), sequences = k.shape, cu_seqlens.shape[0] - 1
    block = power_of_two(width, COLUMNS)
    kv_store_kernel[(tokens, triton.cdiv(width, block))](
        k,
        v,
        kv,
        extents,
        cu_extents,
        cu_seqlens,
        positions,
        k.stride(0),
        v.stride(0),
        kv.stride(0),
        width,
        sequences,
        row_start,
        layer,
        SIZE=head_size,
        SEQUENCES=power_of_two(sequences, 1 << 16, least=SEQUENCES),
        BLOCK=block,
        num_warps=WARPS,
    )
