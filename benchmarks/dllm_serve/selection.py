"""Which keys Sparse-dLLM and dLLM-Serve's public code keep: one set for all heads, by the mean over heads of what the block's mean
query gives each candidate, then pooled (OpenMOSS/Sparse-dLLM; `uniform-published` of Mosaic's sparse keys).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mosaic.models.policies.sparse_keys import SparseKeys

__all__ = ["DELAY", "OPTIONS", "chosen", "scores_of"]

OPTIONS = SparseKeys(retention=0.5, selection="uniform-published", pool=3, delay=1)
"""The paper's table 3."""
DELAY = OPTIONS.delay


def scores_of(mean: Tensor, k: Tensor) -> Tensor:
    """Return float32 [...] of keys [..., K, H] by queries [..., N, H]: the dot product, as a mean over the query heads."""
    heads, kv_heads = mean.shape[-2], k.shape[-2]
    of_group = mean.unflatten(-2, (kv_heads, heads // kv_heads)).sum(-2)
    return (of_group * k).sum((-1, -2), dtype=torch.float32) / heads


def chosen(scores: Tensor, most: int) -> Tensor:
    """Return int64 [B, most]: candidates in order of their pooled scores, of equal ones the first.

    Scores [B, C] are -inf where there is no candidate.
    """
    pooled = F.max_pool1d(scores[:, None], OPTIONS.pool, stride=1, padding=OPTIONS.pool // 2)[:, 0]
    pooled = pooled.masked_fill(scores == float("-inf"), float("-inf"))
    return pooled.sort(dim=-1, descending=True, stable=True).indices[:, :most]
