"""rotary_store on CUDA: heads of q and k normed and rotated, q in place, k and v into the rows that their sequences own.

One program a row and group of heads, of queries or of keys with their values. Legend: T tokens, N query heads, H head size, W
width of keys, R rotated columns of a head.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.kv_store import place_of
from mosaic.kernels.cuda.shared.launching import power_of_two, tl, triton
from mosaic.kernels.cuda.shared.sequences import SEQUENCES

# Untuned defaults: 8 elements a thread, and as many of those that they turn with.
ELEMENTS: Final = 1024
WARPS: Final = 4


@triton.jit
def _turned(x, norm, column, partner, cosine, sine, mask, eps, SIZE: tl.constexpr, NORM: tl.constexpr):
    """Heads of one row, x their first elements [N, 1]: normed and rotated, [N, H], when all threads have read them."""
    value = tl.load(x + column[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(x + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        inverse = (1.0 / tl.sqrt(tl.sum(value * value, 1) / SIZE + eps))[:, None]
        within = column < SIZE
        value *= inverse * tl.load(norm + column, mask=within, other=0.0).to(tl.float32)[None, :]
        other *= inverse * tl.load(norm + partner, mask=within, other=0.0).to(tl.float32)[None, :]
    tl.debug_barrier()  # an element is read by the thread that it turns with too
    return value * cosine[None, :] + other * sine[None, :]


@triton.jit(do_not_specialize=["sequences", "row_start", "layer"])
def rotary_store_kernel(
    q,
    k,
    v,
    kv,
    extents,
    cu_extents,
    cu_seqlens,
    positions,
    inv_freq,
    q_norm,
    k_norm,
    numbers,
    q_stride,
    k_stride,
    v_stride,
    kv_stride,
    sequences,
    row_start,
    layer,
    factor,
    eps,
    Q_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    OWN: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    Q_PARTS: tl.constexpr = (Q_HEADS + BLOCK_N - 1) // BLOCK_N
    row = tl.program_id(0)
    part = tl.program_id(1)
    wide = row.to(tl.int64)
    column = tl.arange(0, BLOCK_H)
    # (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin); columns beyond both halves stay
    turns = column < 2 * HALF
    second = column >= HALF
    if OWN:  # a row of frequencies for each sequence
        inv_freq += tl.load(numbers + row).to(tl.int64) * HALF
    frequency = tl.load(inv_freq + tl.where(second, column - HALF, column), mask=turns, other=0.0)
    angle = tl.load(positions + row).to(tl.float32) * frequency
    cosine = tl.where(turns, tl.cos(angle) * factor, 1.0)
    sine = tl.where(turns, tl.sin(angle) * factor, 0.0)
    sine = tl.where(second, sine, -sine)
    partner = tl.where(turns, tl.where(second, column - HALF, column + HALF), column)
    if part < Q_PARTS:
        head = part * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (head < Q_HEADS)[:, None] & (column < SIZE)[None, :]
        x = q + wide * q_stride + head[:, None] * SIZE
        turned = _turned(x, q_norm, column, partner, cosine, sine, mask, eps, SIZE, NORM)
        tl.store(x + column[None, :], turned.to(q.dtype.element_ty), mask=mask)
    else:
        head = (part - Q_PARTS) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (head < HEADS)[:, None] & (column < SIZE)[None, :]
        x = k + wide * k_stride + head[:, None] * SIZE
        turned = _turned(x, k_norm, column, partner, cosine, sine, mask, eps, SIZE, NORM)
        values = tl.load(v + wide * v_stride + head[:, None] * SIZE + column[None, :], mask=mask, other=0.0)
        base, count, token = place_of(row, extents, cu_extents, cu_seqlens, positions, sequences, row_start, SEQUENCES)
        kept = mask & (token >= 0)
        place = kv + base * kv_stride + (2 * layer * HEADS + head[:, None]) * SIZE * count + token * SIZE
        tl.store(place + column[None, :], turned.to(kv.dtype.element_ty), mask=kept)
        tl.store(place + HEADS * SIZE * count + column[None, :], values.to(kv.dtype.element_ty), mask=kept)


def launch(
    *, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, cu_seqlens: Tensor,
    positions: Tensor, inv_freq: Tensor, layer: int, head_size: int, q_norm: Tensor | None = None,
    k_norm: Tensor | None = None, sequences: Tensor | None = None, eps: float = 0.0, factor: float = 1.0,
    row_start: int = 0, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Update q and kv."""
    q_heads, heads = q.shape[1] // head_size, k.shape[1] // head_size
    count = cu_seqlens.shape[0] - 1
    block_h = power_of_two(head_size, 1 << 16)
    block_n = power_of_two(q_heads, max(1, ELEMENTS // block_h))
    parts = triton.cdiv(q_heads, block_n) + triton.cdiv(heads, block_n)
    rotary_store_kernel[(q.shape[0], parts)](
        q,
        k,
        v,
        kv,
        extents,
        cu_extents,
        cu_seqlens,
        positions,
        inv_freq,
        q if q_norm is None else q_norm,
        k if k_norm is None else k_norm,
        positions if sequences is None else sequences,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        kv.stride(0),
        count,
        row_start,
        layer,
        float(factor),
        eps,
        Q_HEADS=q_heads,
        HEADS=heads,
        SIZE=head_size,
        HALF=inv_freq.shape[-1],
        NORM=q_norm is not None,
        OWN=sequences is not None,
        SEQUENCES=power_of_two(count, 1 << 16, least=SEQUENCES),
        BLOCK_N=block_n,
        BLOCK_H=block_h,
        num_warps=WARPS,
    )
