"""packed_attention: softmax(q k^T * scale) v per sequence, over a sequence's own keys and the packed keys of other parts.

`mosaic.registrar.operators.packed_attention` says which these are. Tiles of query rows times tiles of keys under an online softmax
in float32 (float64 for float64), one key-value head at a time. kv overlaps no other operand. Legend: T rows, S keys, B sequences, K
KV heads, G heads of a group, H size.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mosaic.kernels.bound_parts import layer_of
from mosaic.kernels.shared.attention import online_softmax, parted, tile_shape
from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.extents import Piece, kept_tokens
from mosaic.kernels.shared.scratch import beginning, tiles_of


def bind(
    *, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, extents: Tensor, held: Tensor, held_row: Tensor, spans: Tensor,
    cu_seqlens: Tensor, y: Tensor, layer: int, slot: int, kv_heads: int, head_size: int, scale: float, span: int = 0,
    keys: int = 0, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write the attention of the query rows into y [T, N*H]; bounds, extents and parts are read on the host; y may be q itself."""
    found = tiles_of("packed_attention", scratch, {"q": q, "kv": kv}, head_size=head_size)
    (query, *wide), tiles = parted(found, masked=False)
    q_KTGH, y_KTGH = (x.view(x.shape[0], kv_heads, -1, head_size).transpose(0, 1) for x in (q, y))
    own = [x.view(x.shape[0], kv_heads, head_size).transpose(0, 1) for x in (k, v)]
    group, bounds = q_KTGH.shape[2], layer_of(held, slot, kv_heads)

    def run() -> None:
        table = zip(
            pairwise(cu_seqlens.tolist()), spans[:, 4].tolist(), extents.tolist(), held_row.tolist(), strict=True
        )
        for (start, end), kept, (row, rows, *_), part in table:
            if end == start:
                continue
            packed = kept_tokens(kv, Piece(0, kept, row, rows, 0), layer, kv_heads, head_size)
            for head in range(kv_heads):
                first, last = bounds[part, head].tolist()
                sides = [
                    (packed[0, head, :first], packed[1, head, :first]),
                    (packed[0, head, last:], packed[1, head, last:]),
                    (own[0][head, start:end], own[1][head, start:end]),
                ]
                seen = sum(len(keys_SH) for keys_SH, _ in sides)
                count, columns = tile_shape(seen, in_place=False)
                tokens = max(count // group, 1)
                for at in range(start, end, tokens):
                    some = q_KTGH[head, at : min(at + tokens, end)]
                    queries = beginning(query, some.shape).copy_(some).flatten(0, 1)[None]
                    result = online_softmax(queries, _key_tiles(sides, columns, wide), scale, tiles, [seen])
                    y_KTGH[head, at : at + len(some)].copy_(result.view(some.shape))

    return run


launch = launcher(bind)


def _key_tiles(
    sides: Sequence[tuple[Tensor, Tensor]], rows: int, wide: Sequence[Tensor]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Keys and values [1, S, H] of all sides in tiles of at most `rows`, in the compute dtype, and the place of each."""
    before = 0
    for k, v in sides:
        for start in range(0, len(k), rows):
            some = [x[None, start : start + rows] for x in (k, v)]
            if wide:
                some = [beginning(tile, x.shape).copy_(x) for tile, x in zip(wide, some, strict=True)]
            yield before, some[0], some[1]
            before += some[0].shape[1]


def reference(
    *, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, extents: Tensor, held: Tensor, held_row: Tensor, spans: Tensor,
    cu_seqlens: Tensor, layer: int, slot: int, kv_heads: int, head_size: int, scale: float, span: int = 0, keys: int = 0,
) -> Tensor:  # fmt: skip
    """Return the attention in plain PyTorch, a head at a time; rows in no sequence are NaN."""
    y, heads = torch.full_like(q, float("nan")), q.shape[1] // head_size
    for b, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        row, rows = extents[b, :2].tolist()
        packed = kept_tokens(kv, Piece(0, int(spans[b, 4]), row, rows, 0), layer, kv_heads, head_size).to(q.dtype)
        for head in range(heads if end > start else 0):
            mine = head * kv_heads // heads
            first, last = layer_of(held, slot, kv_heads)[held_row[b], mine].tolist()
            of_head = slice(mine * head_size, (mine + 1) * head_size)
            keys_SH, values_SH = (
                torch.cat([packed[place, mine, :first], packed[place, mine, last:], x[start:end, of_head]])
                for place, x in enumerate((k, v))
            )
            queries = q[start:end, head * head_size : (head + 1) * head_size]
            weights = torch.softmax(queries @ keys_SH.T * scale, dim=1)
            y[start:end, head * head_size : (head + 1) * head_size] = weights @ values_SH
    return y
