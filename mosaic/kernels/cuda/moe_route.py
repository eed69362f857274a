"""moe_route on CUDA: scores of the experts, then the top k.

Contract: moe_route(x[C, D], weight[E, D], bias[E] float32?; top_k, normalize, scoring, groups, top_groups, scale) ->
scores[C, k] in the dtype of x, experts[C, k] int64; logits and scores in float32, softmax over all E or sigmoid of each,
chosen by score + bias in the `top_groups` groups whose two best sum up highest, descending, ties to the lower expert
and group; then, without the bias, divided by their sum if `normalize`, times `scale`. One program a tile of rows, all
experts at once. Source: LLaDA-MoE's router (softmax, normalize off), Qwen3-MoE's (either), LLaDA2.0's (sigmoid, 1e-20
added to the sum). Legend: C rows, D hidden, E experts, G groups.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mosaic.kernels.cuda.shared.launching import DOT_MINIMUM, Tile, power_of_two, tile_for, tl, triton
from mosaic.kernels.moe_route import TINY, reference
from mosaic.kernels.shared.operands import INDEX, check_shapes

__all__ = ["launch", "reference"]

# Untuned defaults by item size: rows, unused, hidden, warps, stages; for more experts than FEW smaller ones, because
# all of them are in registers at once, twice with a bias or groups.
TILES: Final = {2: Tile(32, 0, 64, 4, 3), 4: Tile(16, 0, 32, 4, 2)}
TILES_OF_MANY: Final = {2: Tile(16, 0, 32, 4, 3), 4: Tile(16, 0, 32, 4, 2)}
FEW: Final = 128


@triton.jit
def top_groups_only(choice, expert, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """Lower to -inf what is not in the groups whose two best sum up highest."""
    outside = float("-inf")
    group_of, kept = expert // GROUP_SIZE, tl.zeros_like(choice) + outside
    # every expert's group total, so that no second layout is needed
    total = tl.zeros_like(choice) + outside
    for group in range(GROUPS):
        member = (group_of == group)[None, :]
        own = tl.where(member, choice, outside)
        best = tl.max(own, 1)
        place = tl.min(tl.where(own == best[:, None], expert[None, :], GROUPS * GROUP_SIZE), 1)
        second = tl.max(tl.where(expert[None, :] == place[:, None], outside, own), 1)
        total = tl.where(member, (best + second)[:, None], total)
    for _ in range(TOP_GROUPS):
        best = tl.max(total, 1)
        place = tl.min(tl.where(total == best[:, None], group_of[None, :], GROUPS), 1)
        member = group_of[None, :] == place[:, None]
        kept = tl.where(member, choice, kept)
        total = tl.where(member, outside, total)
    return kept


@triton.jit(do_not_specialize=["rows"])
def moe_route_kernel(
    x,
    weight,
    bias,
    scores,
    experts,
    x_stride,
    weight_stride,
    scores_stride,
    experts_stride,
    rows,
    hidden,
    scale,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TINY: tl.constexpr,
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
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logits))
    else:
        logits = tl.where(expert_mask[None, :], logits, float("-inf"))
        exponential = tl.exp(logits - tl.max(logits, 1)[:, None])
        score = exponential / tl.sum(exponential, 1)[:, None]
    choice = score
    if BIASED:
        choice += tl.load(bias + expert, mask=expert_mask, other=0.0)[None, :]
    choice = tl.where(expert_mask[None, :], choice, float("-inf"))
    if GROUPS > 0:
        choice = top_groups_only(choice, expert, GROUPS, EXPERTS // GROUPS, TOP_GROUPS)

    place = tl.arange(0, BLOCK_TOP)
    chosen = tl.zeros([BLOCK_C, BLOCK_TOP], tl.float32)
    chosen_expert = tl.zeros([BLOCK_C, BLOCK_TOP], tl.int64)
    for turn in range(TOP_K):
        best = tl.max(choice, 1)
        index = tl.min(tl.where(choice == best[:, None], expert[None, :], BLOCK_E), 1)
        here = expert[None, :] == index[:, None]
        if BIASED:
            best = tl.sum(tl.where(here, score, 0.0), 1)
        chosen = tl.where((place == turn)[None, :], best[:, None], chosen)
        chosen_expert = tl.where((place == turn)[None, :], index[:, None].to(tl.int64), chosen_expert)
        choice = tl.where(here, float("-inf"), choice)
    if NORMALIZE:
        total = tl.sum(chosen, 1)
        if SIGMOID:
            total += TINY
        chosen = chosen / total[:, None]
    chosen *= scale
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
    bias: Tensor | None = None,
    scoring: str = "softmax",
    groups: int = 0,
    top_groups: int = 0,
    scale: float = 1.0,
    scratch: Tensor | None = None,
) -> None:
    """Write the scores and the experts of every row, [C, k] each."""
    (rows, hidden), num_experts, dtype = x.shape, weight.shape[0], x.dtype
    check_shapes(
        "moe_route",
        x=(x, (rows, hidden), None),
        weight=(weight, (num_experts, hidden), dtype),
        bias=(bias, (num_experts,), torch.float32),
        scores=(scores, (rows, top_k), dtype),
        experts=(experts, (rows, top_k), INDEX[0]),
    )
    tile = tile_for(TILES if num_experts <= FEW else TILES_OF_MANY, x)
    moe_route_kernel[(triton.cdiv(rows, tile.rows),)](
        x,
        weight,
        bias if bias is not None else weight,
        scores,
        experts,
        x.stride(0),
        weight.stride(0),
        scores.stride(0),
        experts.stride(0),
        rows,
        hidden,
        scale,
        EXPERTS=num_experts,
        TOP_K=top_k,
        NORMALIZE=normalize,
        SIGMOID=scoring == "sigmoid",
        BIASED=bias is not None,
        GROUPS=groups,
        TOP_GROUPS=top_groups,
        TINY=TINY,
        BLOCK_C=tile.rows,
        BLOCK_E=power_of_two(num_experts, 1 << 16, least=DOT_MINIMUM),
        BLOCK_D=tile.inner,
        BLOCK_TOP=power_of_two(top_k, 1 << 16),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
