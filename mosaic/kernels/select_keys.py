"""select_keys: the rows of each sequence whose keys are kept, per list.

`mosaic.registrar.operators.select_keys` defines candidates, pooling and ties (dLLM-Serve, equations 5 and 6). The candidates of
one sequence and list are sorted in the plan's own memory. Legend: T rows, B sequences.
"""

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mosaic.kernels.bound_parts import layer_of
from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.order import fill_order, indices_of
from mosaic.kernels.shared.scratch import tiles_of


def bind(
    *, scores: Tensor, spans: Tensor, cu_seqlens: Tensor, chosen: Tensor, members: int, pool: int, pools: str = "each",
    held: Tensor | None = None, held_row: Tensor | None = None, slot: int = 0, kv_heads: int = 1, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write the chosen rows of each sequence and list into chosen [N, T]; spans and bounds are read on the host."""
    tiles = [tile.numpy() for tile in tiles_of("select_keys", scratch, {"scores": scores})]
    given, rows, width = scores.numpy(), chosen.numpy(), pool if pools == "each" else 1

    def run() -> None:
        bounds = zip(pairwise(cu_seqlens.tolist()), spans.tolist(), strict=True)
        for sequence, ((start, end), (_, _, low, high, kept)) in enumerate(bounds):
            count = end - start - (high - low)
            side, pooled, total, order, ranks = (tile[:count] for tile in tiles)
            for own in range(len(rows) if end > start else 0):
                if held is not None and held_row is not None:
                    kept = kept_of_part(layer_of(held, slot, kv_heads)[held_row[sequence], own])
                total.fill(0.0)
                for scores_T in given[own * members : (own + 1) * members]:
                    side[:low], side[low:] = scores_T[start : start + low], scores_T[start + high : end]
                    _pool(side, pooled, width)
                    np.add(total, pooled, out=total)
                if width < pool:
                    np.copyto(side, total)
                    _pool(side, total, pool)
                fill_order(order, ranks, total)
                order.sort()
                found = indices_of(order[:kept])
                found.sort()
                behind = found[np.searchsorted(found, low) :]
                np.add(behind, high - low, out=behind)
                mine = rows[own, start : start + kept + high - low]
                np.add(found, start, out=mine[:kept], casting="unsafe")
                mine[kept:] = range(start + low, start + high)

    return run


launch = launcher(bind)


def kept_of_part(bounds: Tensor) -> int:
    """Count the packed rows between two bounds."""
    begin, end = bounds.tolist()
    return int(end - begin)


def _pool(side: NDArray[np.float32], pooled: NDArray[np.float32], pool: int) -> None:
    """Write the largest of the `pool` scores around each."""
    pooled[:] = side
    for distance in range(1, min(pool // 2, len(side) - 1) + 1):
        np.maximum(pooled[distance:], side[:-distance], out=pooled[distance:])
        np.maximum(pooled[:-distance], side[distance:], out=pooled[:-distance])


def reference(
    *, scores: Tensor, spans: Tensor, cu_seqlens: Tensor, members: int, pool: int, pools: str = "each",
    held: Tensor | None = None, held_row: Tensor | None = None, slot: int = 0, kv_heads: int = 1,
) -> Tensor:  # fmt: skip
    """Return the chosen rows, in plain PyTorch; -1 where there is none."""
    chosen = torch.full((len(scores) // members, scores.shape[1]), -1, dtype=torch.int32)

    def pooled(x: Tensor) -> Tensor:
        return torch.nn.functional.max_pool1d(x[None], pool, 1, pool // 2)[0]

    bounds = zip(pairwise(cu_seqlens.tolist()), spans.tolist(), strict=True)
    for b, ((start, end), (_, _, low, high, all_kept)) in enumerate(bounds):
        if start == end:
            continue
        row = torch.tensor([r for r in range(start, end) if not low <= r - start < high])
        mine = pooled(scores[:, row]) if pools == "each" else scores[:, row]
        total = mine.view(len(chosen), members, -1).sum(1)
        total = total if pools == "each" else pooled(total)
        best = torch.sort(total, dim=1, descending=True, stable=True).indices
        for own in range(len(chosen)):
            kept = (
                all_kept
                if held is None or held_row is None
                else kept_of_part(layer_of(held, slot, kv_heads)[held_row[b], own])
            )
            chosen[own, start : start + kept] = row[best[own, :kept].sort().values]
            chosen[own, start + kept : start + kept + high - low] = torch.arange(start + low, start + high)
    return chosen
