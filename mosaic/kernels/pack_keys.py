"""pack_keys: the chosen keys and values of each sequence into its rows of a state, side by side, per head.

`mosaic.registrar.operators.pack_keys` says where they lie (dLLM-Serve, section 4.5). kv overlaps no other operand. Legend: T rows,
R rows of the state, L layers, B sequences, K KV heads, H size.
"""

from itertools import pairwise

import torch
from torch import Tensor

from mosaic.kernels.bound_parts import layer_of
from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.extents import Piece, kept_tokens
from mosaic.kernels.shared.scratch import beginning, tiles_of


def bind(
    *, k: Tensor, v: Tensor, chosen: Tensor, spans: Tensor, cu_seqlens: Tensor, extents: Tensor, kv: Tensor, layer: int,
    kv_heads: int, head_size: int, held: Tensor | None = None, held_row: Tensor | None = None, slot: int = 0,
    row_start: int = 0, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Update kv; spans, bounds and extents are read on the host."""
    (tile,) = tiles_of("pack_keys", scratch, {"k": k}, head_size=head_size)
    heads, each = k.shape[1] // head_size, chosen.shape[0] == k.shape[1] // head_size

    def run() -> None:
        table = zip(pairwise(cu_seqlens.tolist()), spans.tolist(), extents.tolist(), strict=True)
        for sequence, ((start, end), (_, _, low, high, kept), (row, rows, *_)) in enumerate(table):
            if end == start:
                continue
            count = kept + high - low
            packed = kept_tokens(kv, Piece(0, count, row, rows, 0), layer, kv_heads, head_size)
            for head in range(heads):
                first, last = 0, kept
                if held is not None and held_row is not None:
                    first, last = layer_of(held, slot, kv_heads)[held_row[sequence], head].tolist()
                taken = chosen[head if each else 0, start : start + last - first + high - low]
                for of_both, x in zip(packed, (k, v), strict=True):
                    of_head, mine = x[:, head * head_size : (head + 1) * head_size], of_both[row_start + head]
                    _copy(mine[first:last], of_head, taken[: last - first], tile)
                    _copy(mine[kept:], of_head, taken[last - first :], tile)

    return run


launch = launcher(bind)


def _copy(to: Tensor, x: Tensor, taken: Tensor, tile: Tensor) -> None:
    """Copy the rows `taken` of x, a tile at a time."""
    for at in range(0, len(to), tile.shape[0]):
        some = to[at : at + tile.shape[0]]
        some.copy_(torch.index_select(x, 0, taken[at : at + len(some)], out=beginning(tile, some.shape)))


def reference(
    *, k: Tensor, v: Tensor, chosen: Tensor, spans: Tensor, cu_seqlens: Tensor, extents: Tensor, kv: Tensor, layer: int,
    kv_heads: int, head_size: int, held: Tensor | None = None, held_row: Tensor | None = None, slot: int = 0,
    row_start: int = 0,
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
            to = torch.arange(count)
            if held is not None and held_row is not None:
                first, last = layer_of(held, slot, kv_heads)[held_row[b], head].tolist()
                to = torch.cat([torch.arange(first, last), torch.arange(kept, count)])
            taken = chosen[min(head, len(chosen) - 1), start : start + len(to)]
            for place, x in enumerate((k, v)):
                packed[place, row_start + head, to] = x.view(-1, heads, head_size)[taken, head].to(kv.dtype)
    return after
