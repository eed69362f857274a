"""A `Transformer` run over any arrangement of rows: the caller says which positions they are, and attends.

Legend: B requests, T rows, P keys, N query heads, K key-value heads, H head size, D hidden, R dims that turn. `...` is [B, T] of a
padded batch, and [T] of packed rows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.bench.baselines import Attention, Transformer

__all__ = [
    "Angles",
    "Attend",
    "Bounds",
    "attend_packed",
    "attend_padded",
    "commit",
    "decided",
    "queries_and_keys",
    "run_layers",
    "values",
]

Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""From a layer's number, queries [..., N, H] and keys and values [..., K, H], rotated, to outputs [..., N, H]."""


class Angles(NamedTuple):
    """Cosines and sines [positions, R] of all positions."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, network: Transformer, longest: int) -> Angles:
        """Make those of a model."""
        return cls(*network.angles(longest))

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Take those of positions int64 [...], as [..., 1, R]."""
        return self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)


def queries_and_keys(attention: Attention, normed: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return rotated queries [..., N, H] and keys [..., K, H] of rows [..., D]."""
    q, k = (part(normed).unflatten(-1, (-1, attention.arch.attention.head_size)) for part in (attention.q, attention.k))
    if attention.norms:
        q, k = attention.norms[0](q), attention.norms[1](k)
    return attention.rotated(q, *angles), attention.rotated(k, *angles)


def values(attention: Attention, normed: Tensor) -> Tensor:
    """Return values [..., K, H] of rows [..., D]."""
    found: Tensor = attention.v(normed).unflatten(-1, (-1, attention.arch.attention.head_size))
    return found


def run_layers(network: Transformer, ids: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
    """Return hidden states [..., D] of rows with token ids int64 [...]."""
    x = F.embedding(ids, network.embedding)
    for number, layer in enumerate(network.layers):
        normed = layer.attention_norm(x)
        q, k = queries_and_keys(layer.attention, normed, angles)
        y = attend(number, q, k, values(layer.attention, normed))
        x = x + layer.attention.o(y.flatten(-2))
        x = x + layer.ffn(layer.ffn_norm(x))
    return x


# --- attention ------------------------------------------------------------------------------------------------------------


def attend_padded(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    """Attend: q [B, T, N, H], k and v [B, P, K, H], seen bool [B, 1, 1, P] or None for all; returns [B, T, N, H]."""
    k, v = _of_all_heads(q, k, v)
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)


class Bounds(NamedTuple):
    """Where the queries and keys of packed requests begin and end: int32 [B + 1] on the device, and on the host."""

    queries: Tensor
    keys: Tensor
    queries_listed: list[int]
    keys_listed: list[int]

    @classmethod
    def of(cls, queries: list[int], keys: list[int], device: torch.device) -> Bounds:
        """Add up numbers of queries and keys."""
        listed = [[0], [0]]
        for ends, counts in zip(listed, (queries, keys), strict=True):
            for count in counts:
                ends.append(ends[-1] + count)
        bounds = torch.tensor(listed, dtype=torch.int32).to(device)
        return cls(bounds[0], bounds[1], *listed)


def attend_packed(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds) -> Tensor:
    """Attend within requests: q [T, N, H], k and v [P, K, H] to [T, N, H]; by flash attention on a card."""
    k, v = _of_all_heads(q, k, v)
    pairs = [*zip(pairwise(bounds.queries_listed), pairwise(bounds.keys_listed), strict=True)]
    if q.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        most_q, most_k = (max(end - start for start, end in ends) for ends in zip(*pairs, strict=True))
        y: Tensor = varlen_attn(q, k, v, bounds.queries, bounds.keys, most_q, most_k)
        return y
    parts = [attend_padded(q[None, a:b], k[None, c:d], v[None, c:d], None)[0] for (a, b), (c, d) in pairs]
    return torch.cat(parts)


def _of_all_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    group = q.shape[-2] // k.shape[-2]
    return (k, v) if group == 1 else (k.repeat_interleave(group, dim=-2), v.repeat_interleave(group, dim=-2))


# --- tokens ---------------------------------------------------------------------------------------------------------------


def decided(network: Transformer, hidden: Tensor, dtype: torch.dtype, most: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the most likely token and its probability, [...] each, of hidden states [..., D].

    Parameters
    ----------
    dtype
        Of the softmax.
    most
        Rows whose logits exist at once, of packed rows; None: all.
    """
    found = [_decided(network, part, dtype) for part in (hidden.split(most) if most else (hidden,))]
    tokens, confidence = zip(*found, strict=True)
    return (tokens[0], confidence[0]) if len(found) == 1 else (torch.cat(tokens), torch.cat(confidence))


def _decided(network: Transformer, hidden: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    logits = network.head(network.norm(hidden))
    token = logits.argmax(-1)
    return token, logits.to(dtype).softmax(-1).gather(-1, token[..., None])[..., 0]


def commit(ids: Tensor, open_: Tensor, token: Tensor, confidence: Tensor) -> None:
    """Decide the most confident open row of each block, in place: ids int64 and open_ bool, and token and confidence, [B, T]."""
    row = confidence.masked_fill(~open_, float("-inf")).argmax(-1, keepdim=True)
    ids.scatter_(1, row, token.gather(1, row))
    open_.scatter_(1, row, False)
