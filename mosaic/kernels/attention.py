"""attention: softmax(q k^T * scale) v per sequence of a packed batch, all tokens visible (non-causal), grouped-query.

Contract: attention(q[T, N*H] sliced, k[S, K*H] whole, v[S, K*H] whole, cu_seqlens[B+1] int32; head_size, scale, span)
-> y[T, N*H]; y may overwrite q; `span` is for the cost model alone. Row r of q is row `row_start + r` of the packed batch
and sees the keys of its own sequence. Tiles of query rows times tiles of key rows, with the online softmax of Milakov
and Gimelshein 2018 (arXiv 1805.02867) in float32 (float64 for float64): nothing of the size T x S exists. Legend: T
query rows, S keys, B sequences, N query heads, K KV heads, H size.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from mosaic.kernels._operands import check_attention
from mosaic.kernels._scratch import tiles_of

__all__ = ["launch", "reference"]


def launch(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    y: Tensor,
    head_size: int,
    scale: float,
    span: int = 0,
    row_start: int = 0,
    scratch: Tensor | None = None,
) -> None:
    """Write the attention of the query rows into y [T, N*H]; `cu_seqlens` is read on the host; y may be q itself."""
    rows = q.shape[0]
    heads, kv_heads = check_attention(q, k, v, cu_seqlens, y, head_size)
    tiles = tiles_of("attention", scratch, {"q": q}, head_size=head_size)
    bounds: list[int] = cu_seqlens.tolist()
    group = heads // kv_heads
    for first, last in pairwise(bounds):
        start, end = max(first - row_start, 0), min(last - row_start, rows)
        if start >= end:
            continue
        for head in range(heads):
            mine = slice(head * head_size, (head + 1) * head_size)
            shared = slice(head // group * head_size, (head // group + 1) * head_size)
            _one_head(
                q[start:end, mine], k[first:last, shared], v[first:last, shared], y[start:end, mine], scale, tiles
            )


def _one_head(q_TH: Tensor, k_SH: Tensor, v_SH: Tensor, y_TH: Tensor, scale: float, tiles: list[Tensor]) -> None:
    """Attend one head of one sequence, a tile of query rows at a time.

    y may be q: a tile of y is written after the last read of the same tile of q, and no other tile of q is touched.
    """
    step = tiles[0].shape[0]
    for start in range(0, q_TH.shape[0], step):
        q = q_TH[start : start + step]
        accumulator = _online_softmax(q, k_SH, v_SH, scale, tiles)
        y_TH[start : start + step].copy_(accumulator)


def _online_softmax(q_CH: Tensor, k_SH: Tensor, v_SH: Tensor, scale: float, tiles: list[Tensor]) -> Tensor:
    """Return softmax(q k^T * scale) v for a tile of query rows, in scratch."""
    scores, accumulator, *vectors = tiles[:7]
    rows, converted = q_CH.shape[0], tiles[7:]
    accumulator = accumulator[:rows]
    maximum, new_maximum, total, tile_total, correction = (vector[:rows] for vector in vectors)
    if converted:
        q_CH = converted[0][:rows].copy_(q_CH)
    step = scores.shape[1]
    for start in range(0, k_SH.shape[0], step):
        k, v = k_SH[start : start + step], v_SH[start : start + step]
        count = k.shape[0]
        if converted:
            k, v = converted[1][:count].copy_(k), converted[2][:count].copy_(v)
        # contiguous whatever the tile's size, so that BLAS gets plain strides
        s = scores.view(-1)[: rows * count].view(rows, count)
        torch.addmm(s, q_CH, k.t(), beta=0, alpha=scale, out=s)
        if start == 0:
            torch.amax(s, dim=1, out=maximum)
            s.sub_(maximum.unsqueeze(1)).exp_()
            torch.sum(s, dim=1, out=total)
            torch.mm(s, v, out=accumulator)
            continue
        torch.amax(s, dim=1, out=new_maximum)
        torch.maximum(new_maximum, maximum, out=new_maximum)
        torch.sub(maximum, new_maximum, out=correction)
        correction.exp_()
        s.sub_(new_maximum.unsqueeze(1)).exp_()
        torch.sum(s, dim=1, out=tile_total)
        total.mul_(correction).add_(tile_total)
        accumulator.mul_(correction.unsqueeze(1)).addmm_(s, v)
        maximum.copy_(new_maximum)
    return accumulator.div_(total.unsqueeze(1))


def reference(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    head_size: int,
    scale: float,
    span: int = 0,
    row_start: int = 0,
) -> Tensor:
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
        weights = torch.softmax(q_NCH @ k_NSH.transpose(1, 2) * scale, dim=2)
        y[start:end] = (weights @ v_NSH).transpose(0, 1).reshape(end - start, -1)
    return y
