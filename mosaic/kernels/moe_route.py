"""moe_route: softmax over the experts, then the top k.

Contract: moe_route(x[C, D], weight[E, D]; top_k, normalize) -> scores[C, k] in the dtype of x, experts[C, k] int64;
softmax in float32 over all E, descending, ties to the lower expert, divided by their sum only if `normalize`. The
logits of 16-bit inputs are kept in float32. Source: LLaDA-MoE's router (normalize off), Qwen3-MoE's (either). Legend: C
rows, D hidden, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mosaic.kernels._operands import INDEX, check_shapes
from mosaic.kernels._scratch import tiles_of

__all__ = ["launch", "reference"]


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
    (count, hidden), num_experts, dtype = x.shape, weight.shape[0], x.dtype
    check_shapes(
        "moe_route",
        weight=(weight, (num_experts, hidden), dtype),
        scores=(scores, (count, top_k), dtype),
        experts=(experts, (count, top_k), INDEX[0]),
    )
    tiles = tiles_of("moe_route", scratch, {"x": x, "weight": weight}, top_k=top_k)
    converted = tiles[4:]
    if converted:
        weight = converted[1].copy_(weight)
    step = tiles[0].shape[0]
    for start in range(0, count, step):
        x_tile = x[start : start + step]
        if converted:
            x_tile = converted[0][: x_tile.shape[0]].copy_(x_tile)
        _route_tile(x_tile, weight, scores[start : start + step], experts[start : start + step], normalize, tiles)


def _route_tile(
    x_CD: Tensor, weight_ED: Tensor, scores_Ck: Tensor, experts_Ck: Tensor, normalize: bool, tiles: list[Tensor]
) -> None:
    probability_CE, best_C, index_C, chosen_Ck = (tile[: x_CD.shape[0]] for tile in tiles[:4])
    torch.mm(x_CD, weight_ED.t(), out=probability_CE)
    torch.softmax(probability_CE, dim=1, out=probability_CE)
    # k passes of max: torch.topk gives no promise about ties
    for place in range(scores_Ck.shape[1]):
        torch.max(probability_CE, dim=1, out=(best_C, index_C))
        chosen_Ck[:, place].copy_(best_C)
        experts_Ck[:, place].copy_(index_C)
        probability_CE.scatter_(1, index_C.unsqueeze(1), -1.0)
    if normalize:
        torch.sum(chosen_Ck, dim=1, out=best_C)
        chosen_Ck.div_(best_C.unsqueeze(1))
    scores_Ck.copy_(chosen_Ck)


def reference(*, x: Tensor, weight: Tensor, top_k: int, normalize: bool) -> dict[str, Tensor]:
    """Return scores and experts in plain PyTorch."""
    probability = torch.softmax(x @ weight.T, dim=1)
    order = torch.sort(probability, dim=1, descending=True, stable=True)
    scores, experts = order.values[:, :top_k], order.indices[:, :top_k]
    return {"scores": scores / scores.sum(dim=1, keepdim=True) if normalize else scores, "experts": experts}
