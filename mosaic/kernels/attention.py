"""attention: softmax(q k^T * scale) v per sequence of a packed batch, bidirectional or in blocks, grouped-query.

Row r of q is row `row_start + r` of the packed batch and sees the keys of its own sequence; with `block`, those of its own
block of `block` rows and of the blocks before; with `sees`, those in [sees[r, 0], sees[r, 1]). Tiles of query rows times
tiles of key rows under an online softmax in float32 (float64 for float64). Legend: T query rows, S keys, B sequences, N query
heads, K KV heads, H size.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mosaic.kernels.shared.attention import evenly, keys_seen, online_softmax, parted, tile_shape, visible
from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.scratch import beginning, tiles_of
from mosaic.registrar.tiles import KEY_ROWS


def bind(
    *, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, y: Tensor, sees: Tensor | None = None, head_size: int,
    scale: float, span: int = 0, block: int = 0, row_start: int = 0, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write the attention of the query rows into y [T, N*H]; `cu_seqlens` is read on the host; y may be q itself."""
    rows = q.shape[0]
    heads, kv_heads = q.shape[1] // head_size, k.shape[1] // head_size
    asked, masked = {"q": q} if sees is None else {"q": q, "sees": sees}, bool(block) or sees is not None
    converted, tiles = parted(tiles_of("attention", scratch, asked, head_size=head_size, block=block), masked=masked)
    group = heads // kv_heads

    def run() -> None:
        bounds: list[int] = cu_seqlens.tolist()
        for first, last in pairwise(bounds):
            start, end = max(first - row_start, 0), min(last - row_start, rows)
            if start >= end:
                continue
            position = row_start + start - first
            seen = keys_seen(range(position, position + end - start), last - first, block)
            since: list[int] = []
            if sees is not None:
                since, ends = sees[start:end].T.tolist()
                seen = [min(end, last - first) for end in ends]
            q_TKGH, y_TKGH = (x[start:end].view(end - start, kv_heads, group, head_size) for x in (q, y))
            k_KSH, v_KSH = (x[first:last].view(last - first, kv_heads, head_size).transpose(0, 1) for x in (k, v))
            for member in range(group):
                queries, results = (x[:, :, member].transpose(0, 1) for x in (q_TKGH, y_TKGH))
                _heads(queries, k_KSH, v_KSH, results, scale, seen, since, converted, tiles)

    return run


launch = launcher(bind)


def _heads(
    q_KTH: Tensor, k_KSH: Tensor, v_KSH: Tensor, y_KTH: Tensor, scale: float, seen: Sequence[int],
    since: Sequence[int], converted: Sequence[Tensor], tiles: list[Tensor],
) -> None:  # fmt: skip
    """Attend one query head of every KV head in one sequence, a tile of query rows at a time, small ones of several heads
    together; `seen` counts the keys that each row sees, those before `since` too.

    y may be q: a tile of y is written after the last read of the same tile of q, and no other tile of q is touched.
    """
    heads, tokens, _ = q_KTH.shape
    rows, keys = tile_shape(max(seen), in_place=not converted)
    together = evenly(heads, min(rows // tokens, KEY_ROWS // keys) if converted else rows // tokens)
    for head in range(0, heads, together):
        mine = slice(head, head + together)
        for start in range(0, tokens, rows):
            q, limits = q_KTH[mine, start : start + rows], seen[start : start + rows]
            if converted:
                q = beginning(converted[0], q.shape).copy_(q)
            parts = _key_tiles(k_KSH[mine], v_KSH[mine], max(limits), keys, converted)
            y_KTH[mine, start : start + rows].copy_(
                online_softmax(q, parts, scale, tiles, limits, since=since[start : start + rows])
            )


def _key_tiles(
    k_ASH: Tensor, v_ASH: Tensor, count: int, rows: int, converted: Sequence[Tensor]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The first `count` keys and values in tiles of `rows`, in the compute dtype."""
    for start in range(0, count, rows):
        k, v = (x[:, start : min(start + rows, count)] for x in (k_ASH, v_ASH))
        if converted:
            k, v = (beginning(wide, x.shape).copy_(x) for wide, x in zip(converted[1:], (k, v), strict=True))
        yield start, k, v


def reference(
    *, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, sees: Tensor | None = None, head_size: int, scale: float,
    span: int = 0, block: int = 0, row_start: int = 0,
) -> Tensor:  # fmt: skip
    """Return the attention in plain PyTorch, with whole score matrices."""
    y = torch.empty_like(q)
    heads, kv_heads = q.shape[1] // head_size, k.shape[1] // head_size
    group, bounds = heads // kv_heads, cu_seqlens.tolist()
    for first, last in pairwise(bounds):
        start, end = max(first - row_start, 0), min(last - row_start, q.shape[0])
        if start >= end:
            continue
        q_NCH = q[start:end].reshape(-1, heads, head_size).transpose(0, 1)
        k_NSH, v_NSH = (
            x[first:last].reshape(-1, kv_heads, head_size).transpose(0, 1).repeat_interleave(group, dim=0)
            for x in (k, v)
        )
        position = row_start + start - first
        seen = visible(
            torch.arange(position, position + end - start),
            last - first,
            block,
            None if sees is None else sees[start:end],
        )
        scores = (q_NCH @ k_NSH.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))
        weights = torch.softmax(scores, dim=2)
        y[start:end] = (weights @ v_NSH).transpose(0, 1).reshape(end - start, -1)
    return y
