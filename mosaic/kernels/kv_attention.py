"""kv_attention: softmax(q k^T * scale) v per sequence, over keys and values kept in rows of a state buffer.

Contract: kv_attention(q[T, N*H] sliced, kv[R, L*2*K*H] whole, key_slots[S] int64 whole, cu_seqlens[B+1] int32 whole,
cu_keys[B+1] int32 whole, positions[T] int32 sliced; layer, kv_heads, head_size, scale, span, block) -> y[T, N*H]; y may
overwrite q; `span` is for the cost model alone. Row r of q is row `row_start + r` of the packed window and sees the keys
of its own sequence; with `block`, at position p, those before (p // block + 1) * block. Key j of sequence b is row
key_slots[cu_keys[b] + j] of kv. A row in no sequence, or that sees no key, is left as it was. The queries of all heads
that share keys are packed into one tile; online softmax in float32 (float64 for float64). Legend: T query rows, R rows,
L layers, S keys, B sequences, N query heads, K KV heads, H size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mosaic.errors import GraphError
from mosaic.kernels._attention import keys_seen, online_softmax, visible, write_limits
from mosaic.kernels._operands import INDEX, check_kv_row, check_shapes, heads_of
from mosaic.kernels._scratch import tiles_of

__all__ = ["check", "launch", "reference"]


def launch(
    *,
    q: Tensor,
    kv: Tensor,
    key_slots: Tensor,
    cu_seqlens: Tensor,
    cu_keys: Tensor,
    positions: Tensor,
    y: Tensor,
    layer: int,
    kv_heads: int,
    head_size: int,
    scale: float,
    span: int = 0,
    block: int = 0,
    row_start: int = 0,
    scratch: Tensor | None = None,
) -> None:
    """Write the attention of the query rows into y [T, N*H]; lengths and positions are read on the host."""
    first_column, group = check(q, kv, key_slots, cu_seqlens, cu_keys, positions, y, layer, kv_heads, head_size)
    tiles = tiles_of("kv_attention", scratch, {"q": q}, head_size=head_size, block=block)
    for start, end, slots in _sequences(cu_seqlens, cu_keys, key_slots, row_start, q.shape[0]):
        seen = keys_seen(positions[start:end].tolist(), slots.shape[0], block)
        for head in range(kv_heads):
            column = first_column + head * head_size
            k, v = (kv[:, at : at + head_size] for at in (column, column + kv_heads * head_size))
            mine = slice(head * group * head_size, (head + 1) * group * head_size)
            queries, results = (x[start:end, mine].view(end - start, group, head_size) for x in (q, y))
            _one_head(queries, k, v, slots, results, scale, seen, block > 0, tiles)


def _sequences(
    cu_seqlens: Tensor, cu_keys: Tensor, key_slots: Tensor, row_start: int, rows: int
) -> Iterator[tuple[int, int, Tensor]]:
    """The rows of this slice that each sequence has, and the slots of its keys; none where either is empty."""
    keys = pairwise(cu_keys.tolist())
    for (first, last), (first_key, last_key) in zip(pairwise(cu_seqlens.tolist()), keys, strict=True):
        start, end = max(first - row_start, 0), min(last - row_start, rows)
        if start < end and first_key < last_key:
            yield start, end, key_slots[first_key:last_key]


def _one_head(
    q_TGH: Tensor, k_RH: Tensor, v_RH: Tensor, slots: Tensor, y_TGH: Tensor, scale: float, seen: Sequence[int],
    blocked: bool, tiles: list[Tensor],
) -> None:  # fmt: skip
    """Attend the G query heads of one KV head in one sequence, a tile of rows of (token, head) at a time.

    y may be q: a tile of y is written after the last read of the same tile of q, and no other tile of q is touched.
    """
    own = 10 if blocked else 7
    (query, *gathered), tiles = tiles[:-own], tiles[-own:]
    (rows, keys), group = tiles[0].shape, q_TGH.shape[1]
    together = min(group, rows)
    tokens = rows // together
    for head in range(0, group, together):
        for start in range(0, q_TGH.shape[0], tokens):
            place = slice(start, start + tokens), slice(head, head + together)
            part, limits = q_TGH[place], seen[start : start + tokens]
            packed = query[: part.shape[0] * part.shape[1]]
            packed.view_as(part).copy_(part)
            if blocked:
                write_limits(limits, part.shape[1], tiles[7])
            parts = _key_tiles(k_RH, v_RH, slots[: max(limits)], keys, gathered)
            result = online_softmax(packed, parts, scale, tiles, blocked=blocked)
            y_TGH[place].copy_(result.view_as(part))


def _key_tiles(
    k_RH: Tensor, v_RH: Tensor, slots: Tensor, rows: int, gathered: Sequence[Tensor]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The keys and values of some slots in tiles of `rows`, gathered, in the compute dtype."""
    for start in range(0, slots.shape[0], rows):
        mine = slots[start : start + rows]
        k, v = (tile[: mine.shape[0]] for tile in gathered[:2])
        for kept, tile in ((k_RH, k), (v_RH, v)):
            if len(gathered) == 2:
                torch.index_select(kept, 0, mine, out=tile)
            else:
                tile.copy_(torch.index_select(kept, 0, mine, out=gathered[2][: mine.shape[0]]))
        yield start, k, v


def check(
    q: Tensor, kv: Tensor, key_slots: Tensor, cu_seqlens: Tensor, cu_keys: Tensor, positions: Tensor, y: Tensor,
    layer: int, kv_heads: int, head_size: int,
) -> tuple[int, int]:  # fmt: skip
    """Check the operands; return the layer's first column and the query heads of a KV head."""
    heads, bounds = heads_of("kv_attention", "q", q, head_size), cu_seqlens.shape[0]
    if heads % kv_heads:
        raise GraphError(f"kv_attention: {heads} query heads do not divide into {kv_heads} groups of keys and values.")
    rows = (q.shape[0], heads * head_size)
    check_shapes(
        "kv_attention",
        q=(q, rows, None),
        kv=(kv, (kv.shape[0], kv.shape[-1]), q.dtype),
        key_slots=(key_slots, (key_slots.shape[0],), INDEX[0]),
        cu_seqlens=(cu_seqlens, (bounds,), torch.int32),
        cu_keys=(cu_keys, (bounds,), torch.int32),
        positions=(positions, rows[:1], torch.int32),
        y=(y, rows, q.dtype),
    )
    return check_kv_row("kv_attention", kv, kv_heads * head_size, layer), heads // kv_heads


def reference(
    *,
    q: Tensor,
    kv: Tensor,
    key_slots: Tensor,
    cu_seqlens: Tensor,
    cu_keys: Tensor,
    positions: Tensor,
    layer: int,
    kv_heads: int,
    head_size: int,
    scale: float,
    span: int = 0,
    block: int = 0,
    row_start: int = 0,
) -> Tensor:
    """Return the attention in plain PyTorch, with whole score matrices; rows that see no key are NaN."""
    y = torch.full_like(q, float("nan"))
    columns = kv[:, 2 * layer * kv_heads * head_size :]
    group = q.shape[1] // head_size // kv_heads
    for start, end, slots in _sequences(cu_seqlens, cu_keys, key_slots, row_start, q.shape[0]):
        k_KSH, v_KSH = columns[slots, : 2 * kv_heads * head_size].view(-1, 2, kv_heads, head_size).permute(1, 2, 0, 3)
        q_KGTH = q[start:end].view(end - start, kv_heads, group, head_size).permute(1, 2, 0, 3)
        hidden = ~visible(positions[start:end], slots.shape[0], block)
        scores = (q_KGTH @ k_KSH[:, None].transpose(2, 3) * scale).masked_fill(hidden, float("-inf"))
        y[start:end] = (torch.softmax(scores, dim=3) @ v_KSH[:, None]).permute(2, 0, 1, 3).flatten(1)
    return y
