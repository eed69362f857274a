"""row_stats: what a sampler needs of each row of logits, in float32.

Contract: row_stats(logits[C, V]) -> token[C] int64 (argmax, ties to the lower index), maximum[C], second[C] (second
largest logit), logsumexp[C], entropy[C] (natural logarithm), float32. The logits are read only. Legend: C rows, V
vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mosaic.kernels._scratch import tiles_of
from mosaic.kernels._statistics import RowStatistics, check_outputs, statistics_reference

__all__ = ["launch", "reference"]


def launch(
    *,
    logits: Tensor,
    token: Tensor,
    maximum: Tensor,
    second: Tensor,
    logsumexp: Tensor,
    entropy: Tensor,
    scratch: Tensor | None = None,
) -> None:
    """Write the five statistics of the rows of logits [C, V]."""
    count, vocabulary = logits.shape
    check_outputs("row_stats", count, token, maximum, second, logsumexp, entropy)
    tiles = tiles_of("row_stats", scratch, {"logits": logits})
    rows, columns = tiles[0].shape
    state = RowStatistics(
        token=token, maximum=maximum, second=second, logsumexp=logsumexp, entropy=entropy, tiles=tiles
    )
    for start in range(0, count, rows):
        part = state.rows(start, start + rows)
        for first in range(0, vocabulary, columns):
            tile = logits[start : start + rows, first : first + columns]
            free = tiles[0].view(-1)[: tile.numel()].view(tile.shape)
            part.update(tile if tile.dtype == torch.float32 else free.copy_(tile), first, free)
        part.finish()


def reference(*, logits: Tensor) -> dict[str, Tensor]:
    """Return the five statistics in plain PyTorch."""
    return statistics_reference(logits)
