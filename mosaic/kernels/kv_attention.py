"""kv_attention: softmax(q k^T * scale) v per sequence, over keys and values kept in rows of a state buffer.

Row r of q is row `row_start + r` of the packed window and sees the first `seen` keys of its own sequence; with `block`,
at position p, those before (p // block + 1) * block; with `sees`, those at positions in [sees[r, 0], sees[r, 1]).
`mosaic.registrar.operators.kv_store` describes the layout of keys. A row in no sequence, or without a visible key, is
unchanged. The queries of all heads that share keys are packed into one tile; online softmax in float32 (float64 for
float64). Legend: T query rows, R rows, L layers, S keys, B sequences, X extents, N query heads, K KV heads, H size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from mosaic.kernels.shared.attention import evenly, keys_seen, online_softmax, parted, tile_shape, visible
from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.extents import kept_tokens, pieces, windows
from mosaic.kernels.shared.scratch import beginning, tiles_of
from mosaic.registrar.tiles import KEY_ROWS

__all__ = ["Finish", "Parts", "attend_heads", "bind", "launch", "reference"]

Parts: TypeAlias = Sequence[tuple[int, Tensor]]
"""Keys and values [2, K, S, H] of tokens that lie side by side, and the position of the first."""
Finish: TypeAlias = Callable[[tuple[slice, slice, slice], Tensor], object]
"""Takes which KV heads, rows and heads of the group a tile has, and its attention [K, T, G, H] in scratch."""


def bind(
    *, q: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, seen: Tensor, cu_seqlens: Tensor, positions: Tensor,
    y: Tensor, sees: Tensor | None = None, layer: int, kv_heads: int, head_size: int, scale: float, span: int = 0,
    keys: int = 0, block: int = 0, parts: int = 1, row_start: int = 0, logsumexp: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write the attention of the query rows into y [T, N*H]; lengths, extents and positions are read on the host.

    `logsumexp`, float32 [T, N], is for `prefix_attention`: the log-sum-exps of the rows' scores.
    """
    group = q.shape[1] // (kv_heads * head_size)
    rows, sums = q.shape[0], None
    if logsumexp is None:
        asked, masked = {"q": q, "kv": kv}, bool(block) or sees is not None
        if sees is not None:
            asked["sees"] = sees
        converted, tiles = parted(
            tiles_of("kv_attention", scratch, asked, head_size=head_size, block=block), masked=masked
        )
    else:
        sums, *found = tiles_of("prefix_attention", scratch, {"q": q, "kv": kv}, head_size=head_size)
        converted, tiles = parted(found, masked=True)
    q_KTGH, y_KTGH = (x.view(rows, kv_heads, group, head_size).transpose(0, 1) for x in (q, y))
    sums_KTG = None if logsumexp is None else logsumexp.view(rows, kv_heads, group).transpose(0, 1)

    def run() -> None:
        kept = _kept(kv, extents, cu_extents, layer, kv_heads, head_size)
        counts: list[int] = seen.tolist()
        for sequence, start, end in windows(cu_seqlens, row_start, rows):
            if counts[sequence]:
                limits = keys_seen(positions[start:end].tolist(), counts[sequence], block)
                since: list[int] = []
                if sees is not None:
                    since, ends = sees[start:end].T.tolist()
                    limits = [min(end, counts[sequence]) for end in ends]
                mine = None if sums_KTG is None else sums_KTG[:, start:end]
                store = _storing(y_KTGH[:, start:end], mine, sums)
                attend_heads(q_KTGH[:, start:end], kept[sequence], scale, limits, converted, tiles, store, sums, since)

    return run


def _storing(y_KTGH: Tensor, sums_KTG: Tensor | None, sums: Tensor | None) -> Finish:
    """Write each tile's result, and its log-sum-exps if they are asked for."""

    def store(tile: tuple[slice, slice, slice], found: Tensor) -> None:
        y_KTGH[tile].copy_(found)
        if sums_KTG is not None and sums is not None:
            sums_KTG[tile].copy_(beginning(sums, found.shape[:3]))

    return store


launch = launcher(bind)


def _kept(kv: Tensor, extents: Tensor, cu_extents: Tensor, layer: int, heads: int, size: int) -> list[Parts]:
    """Keys and values of one layer that each sequence has rows for."""
    return [
        [(piece.start, kept_tokens(kv, piece, layer, heads, size)) for piece in owned]
        for owned in pieces(extents, cu_extents)
    ]


def attend_heads(
    q_KTGH: Tensor, kept: Parts, scale: float, seen: Sequence[int], converted: Sequence[Tensor], tiles: list[Tensor],
    finish: Finish, sums: Tensor | None = None, since: Sequence[int] = (),
) -> None:  # fmt: skip
    """Attend in one sequence, a tile of rows of (token, head of the group) at a time, small ones of several KV heads together.

    `finish` takes each tile when it is done, and its log-sum-exps are the beginning of `sums` then. It may write over the same
    tile of q: that is not read again, and no other tile is written.

    Parameters
    ----------
    q_KTGH
        Query rows of every KV head and head of its group.
    kept
        The keys, in order of position; unless `since` is given, every row sees a key of the first tile.
    seen, since
        How many of them each row sees, and from which on, where not from the first.
    converted, tiles
        As `parted` gives them.
    """
    (query, *wide), (heads, count, group, _) = converted, q_KTGH.shape
    most = max(seen)
    whole = kept[0][0] + kept[0][1].shape[2] >= most and not wide
    rows, keys = tile_shape(most, in_place=whole)
    members = min(group, rows)
    places = [*_places(kept, keys)]
    together = evenly(heads, min(rows // (members * count), KEY_ROWS // keys if wide else heads))
    tokens = rows // members
    for head in range(0, heads, together):
        mine = slice(head, head + together)
        for member in range(0, group, members):
            for start in range(0, count, tokens):
                tile = mine, slice(start, start + tokens), slice(member, member + members)
                part, limits = q_KTGH[tile], seen[start : start + tokens]
                apart = query.dtype != q_KTGH.dtype or members > 1
                packed = beginning(query, part.shape).copy_(part).flatten(1, 2) if apart else part.squeeze(2)
                parts = _key_tiles(places, mine, max(limits), wide)
                log_sums = None if sums is None else sums[: packed.shape[0] * packed.shape[1]]
                finish(
                    tile,
                    online_softmax(packed, parts, scale, tiles, limits, log_sums, since[start : start + tokens]).view(
                        part.shape
                    ),
                )


def _places(kept: Parts, keys: int) -> Iterator[tuple[int, Tensor]]:
    """The same in parts of at most `keys` keys."""
    for first, both in kept:
        for start in range(0, both.shape[2], keys):
            yield first + start, both[:, :, start : start + keys]


def _key_tiles(places: Parts, heads: slice, count: int, wide: Sequence[Tensor]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The first `count` keys and values of some heads in the compute dtype: views where they lie, or converted tiles."""
    for start, both in places:
        if start >= count:
            return
        part = both[:, heads, : count - start]
        k, v = (beginning(tile, x.shape).copy_(x) for tile, x in zip(wide, part, strict=True)) if wide else part
        yield start, k, v


def reference(
    *, q: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, seen: Tensor, cu_seqlens: Tensor, positions: Tensor,
    layer: int, kv_heads: int, head_size: int, scale: float, span: int = 0, keys: int = 0, block: int = 0, parts: int = 1,
    row_start: int = 0, sees: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the attention in plain PyTorch, with whole score matrices; rows that see no key are NaN."""
    y = torch.full_like(q, float("nan"))
    group = q.shape[1] // head_size // kv_heads
    kept = _kept(kv, extents, cu_extents, layer, kv_heads, head_size)
    for sequence, start, end in windows(cu_seqlens, row_start, q.shape[0]):
        count = int(seen[sequence])
        if not count:
            continue
        first = kept[sequence][0][0]
        k_KSH, v_KSH = torch.cat([both for _, both in kept[sequence]], dim=2)[:, :, : count - first].to(q.dtype)
        q_KGTH = q[start:end].view(end - start, kv_heads, group, head_size).permute(1, 2, 0, 3)
        hidden = ~visible(positions[start:end], count, block, None if sees is None else sees[start:end])[:, first:]
        scores = (q_KGTH @ k_KSH[:, None].transpose(2, 3) * scale).masked_fill(hidden, float("-inf"))
        y[start:end] = (torch.softmax(scores, dim=3) @ v_KSH[:, None]).permute(2, 0, 1, 3).flatten(1)
    return y
