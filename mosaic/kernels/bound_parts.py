"""bound_parts: which packed rows of each head have keys of which part of a sequence.

`mosaic.registrar.operators.bound_parts` says where the numbers go. Legend: T rows, B sequences, N lists, E rows and W columns of
the state.
"""

from itertools import pairwise

import numpy as np
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher


def bind(
    *, chosen: Tensor, spans: Tensor, cu_seqlens: Tensor, held_rows: Tensor, held: Tensor, slot: int, kv_heads: int, heads: int,
    row_start: int = 0, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Update held; spans, bounds and rows are read on the host."""
    lists, state = chosen.numpy(), layer_of(held, slot, kv_heads).numpy()

    def run() -> None:
        table = zip(pairwise(cu_seqlens.tolist()), spans.tolist(), held_rows.tolist(), strict=True)
        for (start, end), (_, _, low, _, kept), (row, parts) in table:
            if end == start:
                continue
            edges = start + np.arange(parts + 1, dtype=np.int32) * (low // parts)
            for own, mine in enumerate(lists[:, start : start + kept]):
                bounds = np.searchsorted(mine, edges)
                for head in range((row_start + own) * heads, (row_start + own + 1) * heads):
                    state[row : row + parts, head] = np.stack([bounds[:-1], bounds[1:]], 1)

    return run


launch = launcher(bind)


def layer_of(held: Tensor, slot: int, kv_heads: int) -> Tensor:
    """View the numbers of a layer, [E, K, 2]."""
    return held.view(len(held), -1, kv_heads, 2)[:, slot]


def reference(
    *, chosen: Tensor, spans: Tensor, cu_seqlens: Tensor, held_rows: Tensor, held: Tensor, slot: int, kv_heads: int, heads: int,
    row_start: int = 0,
) -> Tensor:  # fmt: skip
    """Return held after the update, in plain PyTorch, a number at a time."""
    after = held.clone()
    mine_EK2 = layer_of(after, slot, kv_heads)
    for b, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        if end == start:
            continue
        (_, _, low, _, kept), (row, parts) = spans[b].tolist(), held_rows[b].tolist()
        for own in range(len(chosen)):
            mine = chosen[own, start : start + kept] - start
            for head in range((row_start + own) * heads, (row_start + own + 1) * heads):
                for part in range(parts):
                    for place in (0, 1):
                        edge = (part + place) * (low // parts)
                        mine_EK2[row + part, head, place] = (mine < edge).sum()
    return after
