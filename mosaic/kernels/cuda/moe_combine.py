"""moe_combine on CUDA: the experts' outputs, weighted and added to the rows they came from.

Each row gathers its own k outputs, in the order of its top-k list and in float32: no atomics, so the same input gives the
same bits. A first launch inverts `order`. Scratch: the inverse, [C*k] int32. Legend: C rows, D hidden, k experts a row.
"""

from typing import Final

import torch
from torch import Tensor

from mosaic.kernels.cuda.shared.launching import power_of_two, tl, triton
from mosaic.kernels.cuda.shared.scratch import floats_of

# Untuned defaults.
COLUMNS: Final = 1024
ASSIGNMENTS: Final = 1024


@triton.jit(do_not_specialize=["count"])
def inverse_kernel(order, inverse, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    assignment = tl.load(order + place, mask=place < count, other=-1)
    known = (assignment >= 0) & (assignment < count)
    tl.store(inverse + assignment, place.to(tl.int32), mask=known)


@triton.jit
def moe_combine_kernel(
    y,
    inverse,
    scores,
    x,
    y_stride,
    scores_stride,
    x_stride,
    columns,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    total = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    for turn in range(TOP_K):
        source = tl.load(inverse + row * TOP_K + turn).to(tl.int64)
        score = tl.load(scores + row * scores_stride + turn).to(tl.float32)
        total += score * tl.load(y + source * y_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(x + row * x_stride + column, total.to(x.dtype.element_ty), mask=mask)


def launch(*, y: Tensor, order: Tensor, scores: Tensor, x: Tensor, scratch: Tensor | None = None) -> None:
    """Add the weighted outputs to x [C, D] in place."""
    (rows, top_k), columns = scores.shape, x.shape[1]
    count = rows * top_k
    inverse, block = floats_of("moe_combine", scratch, count).view(torch.int32), power_of_two(columns, COLUMNS)
    inverse_kernel[(triton.cdiv(count, ASSIGNMENTS),)](order, inverse, count, BLOCK=ASSIGNMENTS, num_warps=4)
    moe_combine_kernel[(rows, triton.cdiv(columns, block))](
        y,
        inverse,
        scores,
        x,
        y.stride(0),
        scores.stride(0),
        x.stride(0),
        columns,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=4,
    )
