"""unembed_stats: the statistics of x @ weight.T, whose rows of logits never exist.

Vocabulary tiles outside, row tiles inside: the weight is read once, logits exist one tile at a time, in float32 whatever the
dtype. Legend: C rows, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.scratch import beginning, tiles_of
from mosaic.kernels.shared.statistics import RowStatistics, statistics_reference


def bind(
    *,
    x: Tensor,
    weight: Tensor,
    token: Tensor,
    maximum: Tensor,
    second: Tensor,
    logsumexp: Tensor,
    entropy: Tensor,
    scratch: Tensor | None = None,
) -> Run:
    """Write the five statistics of the logits of x [C, D] against weight [V, D]."""
    tiles = tiles_of("unembed_stats", scratch, {"x": x, "weight": weight})
    state = RowStatistics(
        token=token, maximum=maximum, second=second, logsumexp=logsumexp, entropy=entropy, tiles=tiles
    )
    return partial(multiply_in, x, weight, state, tiles[11:])


launch = launcher(bind)


def multiply_in(x_CD: Tensor, weight_VD: Tensor, state: RowStatistics, converted: Sequence[Tensor]) -> None:
    """Bring the logits x @ weight.T into the state, tile by tile.

    `converted` is empty for float32; else two float32 tiles, for rows of x and of the weight.
    """
    count, vocabulary = x_CD.shape[0], weight_VD.shape[0]
    rows, columns = state.tiles[0].shape
    for first in range(0, vocabulary, columns):
        weight_tile = weight_VD[first : first + columns]
        if converted:
            weight_tile = converted[1][: weight_tile.shape[0]].copy_(weight_tile)
        for start in range(0, count, rows):
            x_tile = x_CD[start : start + rows]
            if converted:
                x_tile = converted[0][: x_tile.shape[0]].copy_(x_tile)
            logits = beginning(state.tiles[0], (x_tile.shape[0], weight_tile.shape[0]))
            torch.mm(x_tile, weight_tile.t(), out=logits)
            state.rows(start, start + rows).update(logits, first, logits)
    state.finish()


def reference(*, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Return the five statistics from whole rows of logits, in plain PyTorch."""
    return statistics_reference(x @ weight.T)
