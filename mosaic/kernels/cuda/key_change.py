"""key_change on CUDA: how far the keys of each sequence's window are from those that are kept for its positions.

One program per row writes its two sums to scratch; one per sequence adds up its rows' sums. So a change depends on no other
sequence. Legend: T rows, K KV heads, H size, R rows of the state, L layers, B sequences, X extents.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.kv_store import place_of
from mosaic.kernels.cuda.query_change import ROWS, change_kernel
from mosaic.kernels.cuda.shared.launching import power_of_two, tl, triton
from mosaic.kernels.cuda.shared.scratch import floats_of
from mosaic.kernels.cuda.shared.sequences import SEQUENCES

# Untuned defaults.
COLUMNS: Final = 2048
"""Most columns that a program has at a time."""
WARPS: Final = 4


@triton.jit(do_not_specialize=["sequences", "layer"])
def row_change_kernel(
    k,
    kv,
    extents,
    cu_extents,
    cu_seqlens,
    positions,
    sums,
    k_stride,
    kv_stride,
    sequences,
    layer,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of k: what its difference and the kept key add up to, squared."""
    row = tl.program_id(0)
    base, count, token = place_of(row, extents, cu_extents, cu_seqlens, positions, sequences, 0, SEQUENCES)
    column = tl.arange(0, BLOCK)
    difference = tl.zeros([BLOCK], tl.float32)
    magnitude = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        inside = (start + column < WIDTH) & (token >= 0)
        key = tl.load(k + row.to(tl.int64) * k_stride + start + column, mask=inside, other=0.0).to(tl.float32)
        at = start + column
        place = kv + base * kv_stride + (2 * layer * WIDTH + at // SIZE * SIZE) * count + token * SIZE + at % SIZE
        earlier = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        difference += (earlier - key) * (earlier - key)
        magnitude += earlier * earlier
    tl.store(sums + 2 * row, tl.sum(difference, 0))
    tl.store(sums + 2 * row + 1, tl.sum(magnitude, 0))


def launch(
    *, k: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, cu_seqlens: Tensor, positions: Tensor, change: Tensor,
    layer: int, head_size: int, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the changes [B]."""
    (count, width), sequences = k.shape, cu_seqlens.shape[0] - 1
    sums = floats_of("key_change", scratch, 2 * count)
    row_change_kernel[(count,)](
        k,
        kv,
        extents,
        cu_extents,
        cu_seqlens,
        positions,
        sums,
        k.stride(0),
        kv.stride(0),
        sequences,
        layer,
        WIDTH=width,
        SIZE=head_size,
        SEQUENCES=power_of_two(sequences, 1 << 16, least=SEQUENCES),
        BLOCK=power_of_two(width, COLUMNS),
        num_warps=WARPS,
    )
    # a sequence with rows ends behind the first
    change_kernel[(sequences,)](cu_seqlens[1:], cu_seqlens, sums, change, ROWS=ROWS, num_warps=1)
