"""moe_route on CUDA: scores of the experts, then the top k.

One launch writes the logits, the next chooses, all experts of a row at once. Scratch: the logits, [C, E] float32. Source:
LLaDA-MoE's router (softmax, normalize off), Qwen3-MoE's (either), LLaDA2.0's (sigmoid, 1e-20 added to the sum). Legend: C
rows, D hidden, E experts, G groups.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import (
    TensorDescriptor,
    Tile,
    has_descriptors,
    power_of_two,
    tile_for,
    tl,
    triton,
)
from mosaic.kernels.cuda.shared.scratch import floats_of
from mosaic.kernels.moe_route import TINY

# Tiles of the product, rows, experts and hidden, by item size. One for any rows: another `inner` adds up in another order,
# so a row's scores would depend on how many others there are. On an H200 (256 experts of 8 groups, hidden 2,048,
# bfloat16, descriptors) both launches take 78 us for 8,576 rows, 21 for 870 and 20 for 64; one launch for product and
# choice took 140, 40 and 40. The best tile of each takes 77 (128x128x64), 19.5 (64x64x128) and 17.5 us (32x64x256).
TILES: Final = {2: Tile(64, 64, 64, 4, 4), 4: Tile(32, 64, 32, 4, 2)}
ELEMENTS: Final = 1024
"""Logits in one tile of the choice; 512 and 2,048 take both launches 0.95 to 1.06 of the time, 4,096 1.15 and more."""


@triton.jit(do_not_specialize=["rows"])
def router_logits_kernel(
    x,
    weight,
    logits,
    x_stride,
    weight_stride,
    rows,
    hidden,
    EXPERTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Write x @ weight.T; transposed within, because tensor cores take few rows as columns without waste."""
    parts: tl.constexpr = (EXPERTS + BLOCK_E - 1) // BLOCK_E
    first_row = tl.program_id(0) // parts * BLOCK_C
    first_expert = tl.program_id(0) % parts * BLOCK_E
    row = first_row.to(tl.int64) + tl.arange(0, BLOCK_C)
    expert = first_expert + tl.arange(0, BLOCK_E)
    inner = tl.arange(0, BLOCK_D)
    row_mask, expert_mask = row < rows, expert < EXPERTS
    if not DESCRIBED:
        x_place = x + row[None, :] * x_stride + inner[:, None]
        weight_place = weight + expert[:, None].to(tl.int64) * weight_stride + inner[None, :]
    total = tl.zeros([BLOCK_E, BLOCK_C], tl.float32)
    for depth in range(0, hidden, BLOCK_D):
        if DESCRIBED:  # zero past the ends
            weight_tile = weight.load([first_expert, depth])
            x_tile = x.load([first_row, depth]).T
        else:
            inside = inner < hidden - depth
            weight_tile = tl.load(weight_place + depth, mask=expert_mask[:, None] & inside[None, :], other=0.0)
            x_tile = tl.load(x_place + depth, mask=inside[:, None] & row_mask[None, :], other=0.0)
        total = tl.dot(weight_tile, x_tile, total, input_precision="ieee")
    place = logits + row[:, None] * EXPERTS + expert[None, :]
    tl.store(place, total.T, mask=row_mask[:, None] & expert_mask[None, :])


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
    logits,
    bias,
    scores,
    experts,
    scores_stride,
    experts_stride,
    rows,
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
    BLOCK_TOP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    expert = tl.arange(0, BLOCK_E)
    row_mask, expert_mask = row < rows, expert < EXPERTS
    place = row[:, None] * EXPERTS + expert[None, :]
    logits = tl.load(logits + place, mask=row_mask[:, None] & expert_mask[None, :], other=0.0)
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
    *, x: Tensor, weight: Tensor, scores: Tensor, experts: Tensor, top_k: int, normalize: bool,
    bias: Tensor | None = None, scoring: str = "softmax", groups: int = 0, top_groups: int = 0, scale: float = 1.0,
    scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the scores and the experts of every row, [C, k] each."""
    (rows, hidden), num_experts = x.shape, weight.shape[0]
    described = has_descriptors(x, weight)
    tile, logits = tile_for(TILES, x), floats_of("moe_route", scratch, rows * num_experts)
    parts = triton.cdiv(num_experts, tile.columns)
    router_logits_kernel[(triton.cdiv(rows, tile.rows) * parts,)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.inner]) if described else x,
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.inner]) if described else weight,
        logits,
        x.stride(0),
        weight.stride(0),
        rows,
        hidden,
        EXPERTS=num_experts,
        BLOCK_C=tile.rows,
        BLOCK_E=tile.columns,
        BLOCK_D=tile.inner,
        DESCRIBED=described,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    block = power_of_two(num_experts, 1 << 16)
    together = max(ELEMENTS // block, 1)
    moe_route_kernel[(triton.cdiv(rows, together),)](
        logits,
        bias if bias is not None else logits,
        scores,
        experts,
        scores.stride(0),
        experts.stride(0),
        rows,
        scale,
        EXPERTS=num_experts,
        TOP_K=top_k,
        NORMALIZE=normalize,
        SIGMOID=scoring == "sigmoid",
        BIASED=bias is not None,
        GROUPS=groups,
        TOP_GROUPS=top_groups,
        TINY=TINY,
        BLOCK_C=together,
        BLOCK_E=block,
        BLOCK_TOP=power_of_two(top_k, 1 << 16),
        num_warps=4,
    )
