"""prefix_attention: softmax(q k^T * scale) v per sequence over kept keys, and the log-sum-exp of each row's scores.

It is `kv_attention`, which also writes the log-sum-exps (`mosaic.registrar.operators.prefix_attention`). A row in no
sequence, or without a visible key, is unchanged in both. Legend: T query rows, R rows, L layers, B sequences, X
extents, N query heads, K KV heads, H size.
"""

from typing import Any

import torch
from torch import Tensor

from mosaic.kernels import kv_attention
from mosaic.kernels.shared.attention import visible
from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.extents import kept_tokens, pieces, windows


def bind(*, q: Tensor, y: Tensor, logsumexp: Tensor, scratch: Tensor | None = None, **given: Any) -> Run:
    """Write the attention of the query rows into y [T, N*H], and the log-sum-exps of their scores into logsumexp [T, N]."""
    return kv_attention.bind(q=q, y=y, logsumexp=logsumexp, scratch=scratch, **given)


launch = launcher(bind)


def reference(
    *, q: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, seen: Tensor, cu_seqlens: Tensor, positions: Tensor,
    layer: int, kv_heads: int, head_size: int, scale: float, span: int = 0, keys: int = 0, block: int = 0, parts: int = 1,
    row_start: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    """Return both in plain PyTorch, with whole score matrices; rows that see no key are NaN."""
    given: dict[str, Any] = {
        "extents": extents, "cu_extents": cu_extents, "seen": seen, "cu_seqlens": cu_seqlens, "layer": layer, "kv_heads": kv_heads,
        "head_size": head_size, "scale": scale, "block": block, "row_start": row_start,
    }  # fmt: skip
    y = kv_attention.reference(q=q, kv=kv, positions=positions, **given)
    sums = torch.full((q.shape[0], q.shape[1] // head_size), float("nan"), dtype=q.dtype)
    owned = pieces(extents, cu_extents)
    for sequence, start, end in windows(cu_seqlens, row_start, q.shape[0]):
        if count := int(seen[sequence]):
            kept = [kept_tokens(kv, piece, layer, kv_heads, head_size)[0] for piece in owned[sequence]]
            k_KSH = torch.cat(kept, dim=1)[:, :count].to(q.dtype)
            q_KGTH = q[start:end].view(end - start, kv_heads, -1, head_size).permute(1, 2, 0, 3)
            hidden = ~visible(positions[start:end], count, block)
            scores = (q_KGTH @ k_KSH[:, None].transpose(2, 3) * scale).masked_fill(hidden, float("-inf"))
            sums[start:end] = torch.logsumexp(scores, 3).flatten(0, 1).T
    return {"y": y, "logsumexp": sums}
