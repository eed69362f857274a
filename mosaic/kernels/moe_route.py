"""moe_route: scores of the experts, then the top k.

The logits of 16-bit inputs are kept in float32. Source: LLaDA-MoE's router (softmax, normalize off), Qwen3-MoE's (either),
LLaDA2.0's (sigmoid, 1e-20 added to the sum). Legend: C rows, D hidden, E experts, G groups.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from mosaic.kernels.shared.scratch import tiles_of

TINY: Final = 1e-20
"""Added to the sum of sigmoids before it divides them."""
PLAIN_TILES: Final = 4
"""Tiles of a router without bias and groups: scores, a row's best and its place, the chosen ones."""


class _Rule(NamedTuple):
    """The attributes that turn scores into choices and weights."""

    normalize: bool
    scoring: str
    groups: int
    top_groups: int
    scale: float


def launch(
    *, x: Tensor, weight: Tensor, scores: Tensor, experts: Tensor, top_k: int, normalize: bool,
    bias: Tensor | None = None, scoring: str = "softmax", groups: int = 0, top_groups: int = 0, scale: float = 1.0,
    scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the scores and the experts of every row, [C, k] each."""
    count = x.shape[0]
    given = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    tiles = tiles_of("moe_route", scratch, given, top_k=top_k, groups=groups)
    many = PLAIN_TILES + (groups > 0 or bias is not None) + 3 * (groups > 0)
    own, converted = tiles[:many], tiles[many:]
    if converted:
        weight = converted[1].copy_(weight)
    rule, step = _Rule(normalize, scoring, groups, top_groups, scale), own[0].shape[0]
    for start in range(0, count, step):
        x_tile = x[start : start + step]
        if converted:
            x_tile = converted[0][: x_tile.shape[0]].copy_(x_tile)
        part = [tile[: x_tile.shape[0]] for tile in own]
        _route_tile(x_tile, weight, bias, scores[start : start + step], experts[start : start + step], rule, part)


def _route_tile(
    x_CD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    scores_Ck: Tensor,
    experts_Ck: Tensor,
    rule: _Rule,
    tiles: list[Tensor],
) -> None:
    score_CE, best_C, index_C, weight_Ck = tiles[:4]
    torch.mm(x_CD, weight_ED.t(), out=score_CE)
    if rule.scoring == "sigmoid":
        torch.sigmoid(score_CE, out=score_CE)
    else:
        torch.softmax(score_CE, dim=1, out=score_CE)
    choice_CE = _choices(bias_E, rule, tiles)
    # k passes of max: torch.topk gives no promise about ties
    for place in range(scores_Ck.shape[1]):
        torch.max(choice_CE, dim=1, out=(best_C, index_C))
        if choice_CE is not score_CE:
            torch.gather(score_CE, 1, index_C.unsqueeze(1), out=best_C.unsqueeze(1))
        weight_Ck[:, place].copy_(best_C)
        experts_Ck[:, place].copy_(index_C)
        choice_CE.scatter_(1, index_C.unsqueeze(1), float("-inf"))
    constant_C = score_CE[:, 0]  # the scores are used up; PyTorch would make a tensor of a Python number
    if rule.normalize:
        torch.sum(weight_Ck, dim=1, out=best_C)
        if rule.scoring == "sigmoid":
            best_C.add_(constant_C.fill_(TINY))
        weight_Ck.div_(best_C.unsqueeze(1))
    if rule.scale != 1.0:
        weight_Ck.mul_(constant_C.fill_(rule.scale).unsqueeze(1))
    scores_Ck.copy_(weight_Ck)


def _choices(bias_E: Tensor | None, rule: _Rule, tiles: list[Tensor]) -> Tensor:
    """Give what the experts are chosen by: the scores, or score + bias with -inf outside the top groups."""
    score_CE, best_C, index_C = tiles[:3]
    if len(tiles) == PLAIN_TILES:
        return score_CE
    choice_CE = tiles[4].zero_() if bias_E is None else tiles[4].copy_(bias_E)
    choice_CE.add_(score_CE)
    if not rule.groups:
        return choice_CE
    best_CG, total_CG, place_CG = tiles[5:8]
    grouped_CGe = choice_CE.view(choice_CE.shape[0], rule.groups, -1)
    torch.max(grouped_CGe, dim=2, out=(best_CG, place_CG))
    grouped_CGe.scatter_(2, place_CG.unsqueeze(2), float("-inf"))
    torch.amax(grouped_CGe, dim=2, out=total_CG)
    grouped_CGe.scatter_(2, place_CG.unsqueeze(2), best_CG.unsqueeze(2))
    total_CG.add_(best_CG)
    lowered_CG = best_CG.fill_(float("-inf"))
    for _ in range(rule.top_groups):
        torch.max(total_CG, dim=1, out=(best_C, index_C))
        total_CG.scatter_(1, index_C.unsqueeze(1), float("-inf"))
        lowered_CG.scatter_(1, index_C.unsqueeze(1), 0.0)
    grouped_CGe.add_(lowered_CG.unsqueeze(2))
    return choice_CE


def reference(
    *, x: Tensor, weight: Tensor, top_k: int, normalize: bool, bias: Tensor | None = None, scoring: str = "softmax",
    groups: int = 0, top_groups: int = 0, scale: float = 1.0,
) -> dict[str, Tensor]:  # fmt: skip
    """Return scores and experts in plain PyTorch."""
    logits = x @ weight.T
    score = torch.sigmoid(logits) if scoring == "sigmoid" else torch.softmax(logits, dim=1)
    choice = score if bias is None else score + bias
    if groups:
        grouped = choice.view(len(x), groups, -1)
        total = grouped.topk(2, dim=2).values.sum(dim=2)
        kept = torch.sort(total, dim=1, descending=True, stable=True).indices[:, :top_groups]
        outside = torch.ones_like(total, dtype=torch.bool).scatter(1, kept, False)
        choice = grouped.masked_fill(outside.unsqueeze(2), float("-inf")).view_as(choice)
    experts = torch.sort(choice, dim=1, descending=True, stable=True).indices[:, :top_k]
    scores = score.gather(1, experts)
    if normalize:
        scores = scores / (scores.sum(dim=1, keepdim=True) + (TINY if scoring == "sigmoid" else 0.0))
    return {"scores": scores * scale, "experts": experts}
