"""moe_combine: the experts' outputs, weighted and added to the rows they came from.

Each row adds its k outputs in the order of its own top-k list, in float32 or wider, so the result does not depend on the sort
or on threads. Legend: C rows, D hidden, k experts a row.
"""

import torch
from torch import Tensor

from mosaic.kernels.shared.scratch import tiles_of


def launch(*, y: Tensor, order: Tensor, scores: Tensor, x: Tensor, scratch: Tensor | None = None) -> None:
    """Add the weighted outputs to x [C, D] in place."""
    rows, top_k = scores.shape
    ids, place, *tiles = tiles_of("moe_combine", scratch, {"order": order, "x": x})
    torch.arange(rows * top_k, out=ids)
    place.scatter_(0, order, ids)  # place[assignment] = its row in y
    place_Ck = place.view(rows, top_k)
    step = tiles[0].shape[0]
    for start in range(0, rows, step):
        mine = slice(start, start + step)
        _combine_tile(y, place_Ck[mine], scores[mine], x[mine], tiles)


def _combine_tile(y_AD: Tensor, place_Ck: Tensor, scores_Ck: Tensor, x_CD: Tensor, tiles: list[Tensor]) -> None:
    index_C, output_CD, *converted = (tile[: x_CD.shape[0]] for tile in tiles)
    total_CD = converted[0].copy_(x_CD) if converted else x_CD
    for place in range(scores_Ck.shape[1]):
        torch.index_select(y_AD, 0, index_C.copy_(place_Ck[:, place]), out=output_CD)
        output, score_C = output_CD, scores_Ck[:, place]
        if converted:
            output, score_C = converted[1].copy_(output_CD), converted[2].copy_(score_C)
        total_CD.addcmul_(output, score_C.unsqueeze(1))
    if converted:
        x_CD.copy_(total_CD)


def reference(*, y: Tensor, order: Tensor, scores: Tensor, x: Tensor) -> Tensor:
    """Return x with the weighted outputs added, in plain PyTorch."""
    top_k = scores.shape[1]
    return x.index_add(0, order // top_k, y * scores.reshape(-1)[order][:, None])
