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
from mosaic.kernels.shared.attention import evenly, keys_seen, online_softmax, parted, tile_shape, visible
from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.operands import INDEX, check_kv_row, check_shapes, heads_of
from mosaic.kernels.shared.scratch import beginning, tiles_of
from mosaic.registrar.tiles import KEY_ROWS

__all__ = ["bind", "check", "launch", "reference"]


def bind(
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
) -> Run:
    """Write the attention of the query rows into y [T, N*H]; lengths and positions are read on the host."""
    first, group = check(q, kv, key_slots, cu_seqlens, cu_keys, positions, y, layer, kv_heads, head_size)
    converted, tiles = parted(tiles_of("kv_attention", scratch, {"q": q}, head_size=head_size, block=block), block)
    rows, width = q.shape[0], kv_heads * head_size
    k_KRH, v_KRH = (
        kv[:, at : at + width].view(-1, kv_heads, head_size).transpose(0, 1) for at in (first, first + width)
    )
    q_KTGH, y_KTGH = (x.view(rows, kv_heads, group, head_size).transpose(0, 1) for x in (q, y))

    def run() -> None:
        for start, end, slots in _sequences(cu_seqlens, cu_keys, key_slots, row_start, rows):
            seen = keys_seen(positions[start:end].tolist(), slots.shape[0], block)
            _heads(q_KTGH[:, start:end], k_KRH, v_KRH, slots, y_KTGH[:, start:end], scale, seen, converted, tiles)

    return run


launch = launcher(bind)


def _sequences(
    cu_seqlens: Tensor, cu_keys: Tensor, key_slots: Tensor, row_start: int, rows: int
) -> Iterator[tuple[int, int, Tensor]]:
    """The rows of this slice that each sequence has, and the slots of its keys; none where either is empty."""
    keys = pairwise(cu_keys.tolist())
    for (first, last), (first_key, last_key) in zip(pairwise(cu_seqlens.tolist()), keys, strict=True):
        start, end = max(first - row_start, 0), min(last - row_start, rows)
        if start < end and first_key < last_key:
            yield start, end, key_slots[first_key:last_key]


def _heads(
    q_KTGH: Tensor, k_KRH: Tensor, v_KRH: Tensor, slots: Tensor, y_KTGH: Tensor, scale: float, seen: Sequence[int],
    converted: Sequence[Tensor], tiles: list[Tensor],
) -> None:  # fmt: skip
    """Attend in one sequence, a tile of rows of (token, head of the group) at a time, small ones of several KV heads
    together where their keys and values follow each other.

    y may be q: a tile of y is written after the last read of the same tile of q, and no other tile of q is touched.
    """
    (query, *gathered), (heads, count, group, _) = converted, q_KTGH.shape
    slots, narrow = slots[: max(seen)], len(gathered) > 2
    whole = _as_slice(slots)
    rows, keys = tile_shape(len(slots), in_place=whole is not None and not narrow)
    members = min(group, rows)
    places = _places(slots, whole, keys)
    most = min(rows // (members * count), KEY_ROWS // keys if narrow else heads)
    together = evenly(heads, most) if all(isinstance(place, slice) for _, place in places) else 1
    tokens = rows // members
    for head in range(0, heads, together):
        mine = slice(head, head + together)
        k, v = k_KRH[mine], v_KRH[mine]
        for member in range(0, group, members):
            for start in range(0, count, tokens):
                tile = mine, slice(start, start + tokens), slice(member, member + members)
                part, limits = q_KTGH[tile], seen[start : start + tokens]
                apart = narrow or members > 1
                packed = beginning(query, part.shape).copy_(part).flatten(1, 2) if apart else part.squeeze(2)
                parts = _key_tiles(k, v, places, max(limits), gathered)
                y_KTGH[tile].copy_(online_softmax(packed, parts, scale, tiles, limits).view(part.shape))


def _places(slots: Tensor, whole: slice | None, rows: int) -> list[tuple[int, Tensor | slice]]:
    """Where tiles of `rows` keys lie: their slots, or the slice that these are where they follow each other."""
    starts = range(0, slots.shape[0], rows)
    if whole is not None:
        return [(start, slice(whole.start + start, min(whole.start + start + rows, whole.stop))) for start in starts]
    parts = [slots[start : start + rows] for start in starts]
    return [(start, _as_slice(part) or part) for start, part in zip(starts, parts, strict=True)]


def _as_slice(slots: Tensor) -> slice | None:
    """The slice that slots are where they follow each other."""
    numbers = slots.numpy()
    first, last = int(numbers[0]), int(numbers[-1])
    follows = last - first == len(numbers) - 1 and bool((numbers[1:] > numbers[:-1]).all())
    return slice(first, last + 1) if follows else None


def _key_tiles(
    k_ARH: Tensor, v_ARH: Tensor, places: Sequence[tuple[int, Tensor | slice]], count: int, gathered: Sequence[Tensor]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The first `count` keys and values in the compute dtype: views where they lie, else gathered tiles of one head."""
    for start, place in places:
        if start >= count:
            return
        if isinstance(place, slice):
            place = slice(place.start, min(place.stop, place.start + count - start))
            k, v = k_ARH[:, place], v_ARH[:, place]
            if len(gathered) > 2:
                k, v = (beginning(wide, x.shape).copy_(x) for wide, x in zip(gathered[:2], (k, v), strict=True))
        else:
            k, v = (_gathered(x[0], place[: count - start], tile, gathered[2:]) for x, tile in
                    zip((k_ARH, v_ARH), gathered[:2], strict=True))  # fmt: skip
        yield start, k, v


def _gathered(kept_RH: Tensor, slots: Tensor, tile: Tensor, narrow: Sequence[Tensor]) -> Tensor:
    """The rows of some slots [1, S, H] in a tile, by way of one in their own dtype where that is another."""
    out = (narrow[0] if narrow else tile)[: slots.shape[0]]
    torch.index_select(kept_RH, 0, slots, out=out)
    return (tile[: slots.shape[0]].copy_(out) if narrow else out).unsqueeze(0)


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
