"""pack_keys: the chosen keys and values of each sequence into its rows of a state, side by side, per head.

`mosaic.registrar.operators.pack_keys` says where they lie (dLLM-Serve, section 4.5). kv overlaps no other operand. Legend: T rows,
R rows of the state, L layers, B sequences, K KV heads, H size.
"""

from itertools import pairwise

import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.extents import Piece, kept_tokens
from mosaic.kernels.shared.scratch import beginning, tiles_of


def bind(
    *, k: Tensor, v: Tensor, chosen: Tensor, spans: Tensor, cu_seqlens: Tensor, extents: Tensor, kv: Tensor, layer: int,
    kv_heads: int, head_size: int, row_start: int = 0, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Update kv; spans, bounds and extents are read on the host."""
    (tile,) = tiles_of("pack_keys", scratch, {"k": k}, head_size=head_size)
    heads, each = k.shape[1] // head_size, chosen.shape[0] == k.shape[1] // head_size

    def run() -> None:
        table = zip(pairwise(cu_seqlens.tolist()), spans.tolist(), extents.tolist(), strict=True)
        for (start, end), (_, _, low, high, kept), (row, rows, *_) in table:
            if end == start:
                continue
            count = kept + high - low
            packed = kept_tokens(kv, Piece(0, count, row, rows, 0), layer, kv_heads, head_size)
            for of_both, x in zip(packed, (k, v), strict=True):
                for head, mine in enumerate(of_both[row_start : row_start + heads]):
                    of_head = x[:, head * head_size : (head + 1) * head_size]
                    for at in range(0, count, tile.shape[0]):
                        to = mine[at : at + tile.shape[0]]
                        taken = chosen[head if each else 0, start + at : start + at + len(to)]
                        to.copy_(torch.index_select(of_head, 0, taken, out=beginning(tile, to.shape)))

    return run


launch = launcher(bind)


def reference(
    *, k: Tensor, v: Tensor, chosen: Tensor, spans: Tensor, cu_seqlens: Tensor, extents: Tensor, kv: Tensor, layer: int,
    kv_heads: int, head_size: int, row_start: int = 0,
) -> Tensor:  # fmt: skip
    """Return kv after the update, in plain PyTorch, a head at a time."""
    after, heads = kv.clone(), k.shape[1] // head_size
    for b, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        if end == start:
            continue
        _, _, low, high, kept = spans[b].tolist()
        count = kept + high - low
        row, rows = extents[b, :2].tolist()
        packed = kept_tokens(after, Piece(0, count, row, rows, 0), layer, kv_heads, head_size)
        for head in range(heads):
            taken = chosen[min(head, len(chosen) - 1), start : start + count]
            for place, x in enumerate((k, v)):
                packed[place, row_start + head] = x.view(-1, heads, head_size)[taken, head].to(kv.dtype)
    return after
