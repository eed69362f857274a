"""moe_route on CUDA: softmax over the experts, then the top k.

Contract: moe_route(x[C, D], weight[E, D]; top_k, normalize) -> scores[C, k] in the dtype of x, experts[C, k] int64;
logits and softmax in float32 over all E, descending, ties to the lower expert, divided by their sum only if
`normalize`. One program a tile of rows, all experts at once. Source: LLaDA-MoE's router (normalize off), Qwen3-MoE's
(either). Legend: C rows, D hidden, E experts.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from mosaic.kernels._operands import INDEX, check_shapes
from mosaic.kernels.cuda._triton import DOT_MINIMUM, Tile, power_of_two, tile_for, tl, triton
from mosaic.kernels.moe_route import reference

__all__ = ["launch", "reference"]

# Untuned defaults by item size: rows, unused, hidden, warps, stages.
TILES: Final = {2: Tile(32, 0, 64, 4, 3), 4: Tile(16, 0, 32, 4, 2)}


@triton.jit(do_not_specialize=["rows"])
def moe_route_kernel(
    x,
    weight,
    scores,
    experts,
    x_stride,
    weight_stride,
    scores_stride,
    experts_stride,
    rows,
    hidden,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    expert = tl.arange(0, BLOCK_E)
    inner = tl.arange(0, BLOCK_D)
    row_mask, expert_mask = row < rows, expert < EXPERTS
    x_place = x + row[:, None] * x_stride + inner[None, :]
    weight_place = weight + expert[None, :].to(tl.int64) * weight_stride + inner[:, None]
    logits = tl.zeros([BLOCK_C, BLOCK_E], tl.float32)
    for depth in range(0, hidden, BLOCK_D):
        inside = inner < hidden - depth
        x_tile = tl.load(x_place + depth, mask=row_mask[:, None] & inside[None, :], other=0.0)
        weight_tile = tl.load(weight_place + depth, mask=inside[:, None] & expert_mask[None, :], other=0.0)
        logits = tl.dot(x_tile, weight_tile, logits, input_precision="ieee")
    logits = tl.where(expert_mask[None, :], logits, float("-inf"))
    exponential = tl.exp(logits - tl.max(logits, 1)[:, None])
    probability = exponential / tl.sum(exponential, 1)[:, None]
    probability = tl.where(expert_mask[None, :], probability, -1.0)

    place = tl.arange(0, BLOCK_TOP)
    chosen = tl.zeros([BLOCK_C, BLOCK_TOP], tl.float32)
    chosen_expert = tl.zeros([BLOCK_C, BLOCK_TOP], tl.int64)
    for turn in range(TOP_K):
        best = tl.max(probability, 1)
        index = tl.min(tl.where(probability == best[:, None], expert[None, :], BLOCK_E), 1)
        chosen = tl.where((place == turn)[None, :], best[:, None], chosen)
        chosen_expert = tl.where((place == turn)[None, :], index[:, None].to(tl.int64), chosen_expert)
        probability = tl.where(expert[None, :] == index[:, None], -1.0, probability)
    if NORMALIZE:
        chosen = chosen / tl.sum(chosen, 1)[:, None]
    mask = row_mask[:, None] & (place < TOP_K)[None, :]
    tl.store(scores + row[:, None] * scores_stride + place[None, :], chosen.to(scores.dtype.element_ty), mask=mask)
    tl.store(experts + row[:, None] * experts_stride + place[None, :], chosen_expert, mask=mask)


def launch(
    *,
    x: Tensor,
    weight: Tensor,
    scores: Tensor,
    experts: Tensor,
    top_k: int,
    normalize: bool,
    scratch: Tensor | None = None,
) -> None:
    """Write the scores and the experts of every row, [C, k] each."""
    (rows, hidden), num_experts, dtype = x.shape, weight.shape[0], x.dtype
    check_shapes(
        "moe_route",
        x=(x, (rows, hidden), None),
        weight=(weight, (num_experts, hidden), dtype),
        scores=(scores, (rows, top_k), dtype),
        experts=(experts, (rows, top_k), INDEX[0]),
    )
    tile = tile_for(TILES, x)
    moe_route_kernel[(triton.cdiv(rows, tile.rows),)](
        x,
        weight,
        scores,
        experts,
        x.stride(0),
        weight.stride(0),
        scores.stride(0),
        experts.stride(0),
        rows,
        hidden,
        EXPERTS=num_experts,
        TOP_K=top_k,
        NORMALIZE=normalize,
        BLOCK_C=tile.rows,
        BLOCK_E=power_of_two(num_experts, 1 << 16, least=DOT_MINIMUM),
        BLOCK_D=tile.inner,
        BLOCK_TOP=power_of_two(top_k, 1 << 16),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
