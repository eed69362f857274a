"""row_stats: the statistics of each row of logits that samplers use, in float32.

The logits are read only. Legend: C rows, V vocabulary.
"""

from functools import partial

import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.scratch import beginning, tiles_of
from mosaic.kernels.shared.statistics import RowStatistics, statistics_reference


def bind(
    *, logits: Tensor, token: Tensor, maximum: Tensor, second: Tensor, logsumexp: Tensor, entropy: Tensor,
    scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write the five statistics of the rows of logits [C, V]."""
    tiles = tiles_of("row_stats", scratch, {"logits": logits})
    state = RowStatistics(
        token=token, maximum=maximum, second=second, logsumexp=logsumexp, entropy=entropy, tiles=tiles
    )
    return partial(take_in, logits, state)


launch = launcher(bind)


def take_in(logits_CV: Tensor, state: RowStatistics) -> None:
    """Bring the rows of logits into the state, some rows at a time and tile by tile."""
    (count, vocabulary), (rows, columns) = logits_CV.shape, state.tiles[0].shape
    for start in range(0, count, rows):
        part = state.rows(start, start + rows)
        for first in range(0, vocabulary, columns):
            tile = logits_CV[start : start + rows, first : first + columns]
            free = beginning(state.tiles[0], tile.shape)
            part.update(tile if tile.dtype == torch.float32 else free.copy_(tile), first, free)
        part.finish()


def reference(*, logits: Tensor) -> dict[str, Tensor]:
    """Return the five statistics in plain PyTorch."""
    return statistics_reference(logits)
