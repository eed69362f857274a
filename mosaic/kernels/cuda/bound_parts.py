"""bound_parts on CUDA: which packed rows of each head have keys of which part of a sequence.

A program finds the bounds of a list's parts in one sequence by bisection, several at a time. Bounds are read on the device alone.
Legend: T rows, B sequences, N lists.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import tl, triton

PARTS: Final = 64
"""Bounds that a program finds at a time. Untuned default."""


@triton.jit(do_not_specialize=["column", "row_start"])
def bound_parts_kernel(
    chosen,
    spans,
    cu_seqlens,
    held_rows,
    held,
    chosen_stride,
    held_stride,
    column,
    row_start,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    own = tl.program_id(0)
    sequence = tl.program_id(1)
    start = tl.load(cu_seqlens + sequence)
    kept = tl.load(spans + 5 * sequence + 4)
    row = tl.load(held_rows + 2 * sequence)
    parts = tl.load(held_rows + 2 * sequence + 1).to(tl.int32)
    if tl.load(cu_seqlens + sequence + 1) > start:
        size = tl.load(spans + 5 * sequence + 2) // parts
        mine = chosen + own.to(tl.int64) * chosen_stride + start
        for some in range(0, parts + 1, BLOCK):
            part = some + tl.arange(0, BLOCK)
            edge = start + part * size
            # rows below `least` lie before the edge, those from `most` on do not
            least = part * 0
            most = part * 0 + kept
            width = kept
            while width > 0:
                middle = (least + most) // 2
                before = (tl.load(mine + middle, mask=middle < most, other=0) < edge) & (middle < most)
                least = tl.where(before, middle + 1, least)
                most = tl.where(before, most, middle)
                width = width // 2
            for head in range((row_start + own) * HEADS, (row_start + own + 1) * HEADS):
                to = held + (row + part) * held_stride + column + 2 * head
                tl.store(to, least, mask=part < parts)
                tl.store(to - held_stride + 1, least, mask=(part > 0) & (part <= parts))


def launch(
    *, chosen: Tensor, spans: Tensor, cu_seqlens: Tensor, held_rows: Tensor, held: Tensor, slot: int, kv_heads: int, heads: int,
    row_start: int = 0, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Update held."""
    bound_parts_kernel[(chosen.shape[0], spans.shape[0])](
        chosen,
        spans,
        cu_seqlens,
        held_rows,
        held,
        chosen.stride(0),
        held.stride(0),
        2 * slot * kv_heads,
        row_start,
        HEADS=heads,
        BLOCK=PARTS,
        num_warps=1,
    )
