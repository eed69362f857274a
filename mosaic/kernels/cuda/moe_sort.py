"""moe_sort on CUDA: the assignments of rows to experts, grouped by expert, by a stable counting sort without atomics.

Four launches: count each expert in each block of assignments; per expert, turn the counts of the blocks into places; offsets
of the experts; write each assignment to offset + place of its block + rank within the block. Scratch: counts [E, blocks]
int32. Legend: C rows, k experts a row, E experts.
"""

from typing import Final

import torch
from torch import Tensor

from mosaic.kernels.cuda.shared.launching import power_of_two, tl, triton
from mosaic.kernels.cuda.shared.scratch import floats_of
from mosaic.registrar.operators.moe_sort import SORT_BLOCK

# Untuned defaults.
EXPERTS: Final = 32  # experts compared with a block of assignments at once
SCAN: Final = 1024  # counts in one tile of a scan


@triton.jit(do_not_specialize=["count", "blocks"])
def count_kernel(
    experts, counts, stride, count, blocks, num_experts, TOP_K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64)
    place = block * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(experts + place // TOP_K * stride + place % TOP_K, mask=place < count, other=-1)
    for start in range(0, num_experts, BLOCK_E):
        expert = start + tl.arange(0, BLOCK_E)
        number = tl.sum((mine[:, None] == expert[None, :]).to(tl.int32), 0)
        tl.store(counts + expert.to(tl.int64) * blocks + block, number, mask=expert < num_experts)


@triton.jit(do_not_specialize=["blocks"])
def place_kernel(counts, offsets, blocks, BLOCK: tl.constexpr):
    """Per expert: counts of the blocks -> places of the blocks within the expert; the sum into offsets[expert + 1]."""
    expert = tl.program_id(0).to(tl.int64)
    total = tl.zeros([1], tl.int32)
    for start in range(0, blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        number = tl.load(counts + expert * blocks + block, mask=block < blocks, other=0)
        tl.store(counts + expert * blocks + block, total + tl.cumsum(number, 0) - number, mask=block < blocks)
        total += tl.sum(number, 0)
    tl.store(offsets + expert + 1 + tl.arange(0, 1), total.to(tl.int64))


@triton.jit
def offsets_kernel(offsets, num_experts, BLOCK: tl.constexpr):
    """Running sum of offsets[1:] in place, and offsets[0] = 0."""
    total = tl.zeros([1], tl.int64)
    tl.store(offsets + tl.arange(0, 1), total)
    for start in range(0, num_experts, BLOCK):
        expert = start + tl.arange(0, BLOCK)
        number = tl.load(offsets + 1 + expert, mask=expert < num_experts, other=0)
        tl.store(offsets + 1 + expert, total + tl.cumsum(number, 0), mask=expert < num_experts)
        total += tl.sum(number, 0)


@triton.jit(do_not_specialize=["count", "blocks"])
def order_kernel(
    experts,
    counts,
    offsets,
    order,
    stride,
    count,
    blocks,
    num_experts,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    place = block * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(experts + place // TOP_K * stride + place % TOP_K, mask=place < count, other=-1)
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_experts, BLOCK_E):
        same = (mine[:, None] == (start + tl.arange(0, BLOCK_E))[None, :]).to(tl.int32)
        rank += tl.sum(same * (tl.cumsum(same, 0) - 1), 1)
    known = (mine >= 0) & (mine < num_experts)
    before = tl.load(counts + mine * blocks + block, mask=known, other=0)
    target = tl.load(offsets + mine, mask=known, other=0) + before + rank
    tl.store(order + target, place, mask=known)


def launch(*, experts: Tensor, order: Tensor, offsets: Tensor, num_experts: int, scratch: Tensor | None = None) -> None:
    """Write the sorted assignment ids and the experts' offsets."""
    rows, top_k = experts.shape
    count = rows * top_k
    blocks, block_e = triton.cdiv(count, SORT_BLOCK), power_of_two(num_experts, EXPERTS)
    counts, stride = floats_of("moe_sort", scratch, blocks * num_experts).view(torch.int32), experts.stride(0)
    tile = {"TOP_K": top_k, "BLOCK": SORT_BLOCK, "BLOCK_E": block_e, "num_warps": 4}
    count_kernel[(blocks,)](experts, counts, stride, count, blocks, num_experts, **tile)
    place_kernel[(num_experts,)](counts, offsets, blocks, BLOCK=SCAN, num_warps=4)
    offsets_kernel[(1,)](offsets, num_experts, BLOCK=power_of_two(num_experts, SCAN), num_warps=4)
    order_kernel[(blocks,)](experts, counts, offsets, order, stride, count, blocks, num_experts, **tile)
