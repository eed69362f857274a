"""unembed_stats: the statistics of x @ weight.T, whose rows of logits never exist.

Contract: unembed_stats(x[C, D], weight[V, D]) -> token[C] int64 (argmax, ties to the lower index), maximum[C],
second[C], logsumexp[C], entropy[C], float32. Vocabulary tiles outside, row tiles inside: the weight is read once,
logits exist one tile at a time, in float32 whatever the dtype. Legend: C rows, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mosaic.kernels._operands import check_shapes
from mosaic.kernels._scratch import tiles_of
from mosaic.kernels._statistics import RowStatistics, check_outputs, statistics_reference

__all__ = ["launch", "reference"]


def launch(
    *,
    x: Tensor,
    weight: Tensor,
    token: Tensor,
    maximum: Tensor,
    second: Tensor,
    logsumexp: Tensor,
    entropy: Tensor,
    scratch: Tensor | None = None,
) -> None:
    """Write the five statistics of the logits of x [C, D] against weight [V, D]."""
    (count, hidden), vocabulary = x.shape, weight.shape[0]
    check_shapes("unembed_stats", weight=(weight, (vocabulary, hidden), x.dtype))
    check_outputs("unembed_stats", count, token, maximum, second, logsumexp, entropy)
    tiles = tiles_of("unembed_stats", scratch, {"x": x, "weight": weight})
    rows, columns = tiles[0].shape
    state = RowStatistics(
        token=token, maximum=maximum, second=second, logsumexp=logsumexp, entropy=entropy, tiles=tiles
    )
    converted = tiles[11:]
    for first in range(0, vocabulary, columns):
        weight_tile = weight[first : first + columns]
        if converted:
            weight_tile = converted[1][: weight_tile.shape[0]].copy_(weight_tile)
        for start in range(0, count, rows):
            x_tile = x[start : start + rows]
            if converted:
                x_tile = converted[0][: x_tile.shape[0]].copy_(x_tile)
            shape = x_tile.shape[0], weight_tile.shape[0]
            logits = tiles[0].view(-1)[: shape[0] * shape[1]].view(shape)
            torch.mm(x_tile, weight_tile.t(), out=logits)
            state.rows(start, start + rows).update(logits, first, logits)
    state.finish()


def reference(*, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Return the five statistics from whole rows of logits, in plain PyTorch."""
    return statistics_reference(x @ weight.T)
