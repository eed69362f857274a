"""The two small transformers in plain PyTorch, written for training speed: rows of all sequences packed in one batch.

Everything but attention works on [T, D] with the same T at every stage of the curriculum, so it compiles once.
Legend: T rows, D hidden, N query heads, K key-value heads, H head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["DECODE_BLOCK", "SIZES", "Attend", "Sizes", "Transformer", "rotary_tables", "token_loss"]

DECODE_BLOCK = 32
"""Tokens of an answer that are decoded together, of both models."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [T, N, H], k and v [T, K, H] -> [T, N * H]."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What config.json says of a model."""

    family: str
    vocabulary: int = 640  # 577 tokens, padded to whole tiles
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 4
    head_size: int = 64
    ffn: int = 768
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    head_norms: bool = False
    block: int = 0
    max_positions: int = 8192 + 256

    def toy(self) -> Sizes:
        """The same family for a CPU: no checkpoint that anyone should use."""
        kv_heads = 4 if self.kv_heads == self.heads else 2
        return replace(self, hidden=128, layers=3, heads=4, kv_heads=kv_heads, head_size=32, ffn=256)


SIZES = {
    "llada": Sizes(family="llada"),
    "sdar": Sizes(family="sdar", kv_heads=2, ffn=832, rope_theta=1_000_000.0, norm_eps=1e-6, head_norms=True, block=32),
}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x over the root of its mean square, in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rotate(x_TNH: Tensor, cos_Th: Tensor, sin_Th: Tensor) -> Tensor:
    """Rotary embedding, rotate-half."""
    first, second = x_TNH.float().chunk(2, dim=-1)
    cos, sin = cos_Th[:, None], sin_Th[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_TNH.dtype)


def before_attention(
    x_TD: Tensor, norm: Tensor, qkv: Tensor, query_norm: Tensor | None, key_norm: Tensor | None, cos: Tensor, sin: Tensor,
    heads: int, kv_heads: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Norm, projections, head norms, rotation."""
    head_size = 2 * cos.shape[1]
    joined = F.linear(rms_norm(x_TD, norm, eps), qkv.to(x_TD.dtype)).unflatten(1, (-1, head_size))
    q, k, v = joined.split([heads, kv_heads, kv_heads], dim=1)
    if query_norm is not None and key_norm is not None:
        q, k = rms_norm(q, query_norm, eps), rms_norm(k, key_norm, eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def after_attention(
    x_TD: Tensor, y: Tensor, output: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, eps: float
) -> Tensor:
    """Output projection and feed-forward, each added to the stream."""
    x_TD = x_TD + F.linear(y, output.to(y.dtype))
    gate, up = F.linear(rms_norm(x_TD, norm, eps), gate_up.to(y.dtype)).chunk(2, dim=-1)
    return x_TD + F.linear(F.silu(gate) * up, down.to(y.dtype))


def token_loss(
    x_TD: Tensor, norm: Tensor, head: Tensor, targets_T: Tensor, weights_T: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Weighted mean of the cross-entropy, and the cross-entropy of every token."""
    logits_TV = F.linear(rms_norm(x_TD, norm, eps), head.to(x_TD.dtype)).float()
    loss_T = F.cross_entropy(logits_TV, targets_T, reduction="none")
    return (loss_T * weights_T).sum() / weights_T.sum().clamp(min=1.0), loss_T.detach()


def rotary_tables(sizes: Sizes, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines float32 [T, H / 2] of positions."""
    half = sizes.head_size // 2
    frequency = sizes.rope_theta ** (-torch.arange(half, device=positions_T.device, dtype=torch.float32) / half)
    angle = positions_T.float()[:, None] * frequency
    return angle.cos(), angle.sin()


class Layer(nn.Module):
    """One layer's weights."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.heads * sizes.head_size
        self.attention_norm = nn.Parameter(torch.ones(sizes.hidden))
        self.ffn_norm = nn.Parameter(torch.ones(sizes.hidden))
        self.qkv = matrix(width + 2 * sizes.kv_heads * sizes.head_size, sizes.hidden)
        self.output = matrix(sizes.hidden, width, 1 / math.sqrt(2 * sizes.layers))
        self.gate_up = matrix(2 * sizes.ffn, sizes.hidden)
        self.down = matrix(sizes.hidden, sizes.ffn, 1 / math.sqrt(2 * sizes.layers))
        self.query_norm = nn.Parameter(torch.ones(sizes.head_size)) if sizes.head_norms else None
        self.key_norm = nn.Parameter(torch.ones(sizes.head_size)) if sizes.head_norms else None


def matrix(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
    """A projection whose outputs start at about `scale`."""
    return nn.Parameter(torch.randn(rows, columns) * (scale / math.sqrt(columns)))


class Transformer(nn.Module):
    """Embedding, layers and an untied head; `attend` says who sees whom.

    `pieces` are the functions around attention, compiled or as they are.
    """

    def __init__(self, sizes: Sizes, *, compiled: bool = False) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Parameter(torch.randn(sizes.vocabulary, sizes.hidden) * 0.5)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.final_norm = nn.Parameter(torch.ones(sizes.hidden))
        self.head = matrix(sizes.vocabulary, sizes.hidden, 0.5)
        self.eager = (before_attention, after_attention, token_loss)
        self.compiled = tuple(torch.compile(piece, dynamic=False) for piece in self.eager) if compiled else self.eager

    def hidden(
        self, ids_T: Tensor, cos: Tensor, sin: Tensor, attend: Attend, dtype: torch.dtype, *, eager: bool = False
    ) -> Tensor:
        """The last layer's output [T, D]."""
        before, after, _ = self.eager if eager else self.compiled
        s = self.sizes
        x_TD = F.embedding(ids_T, self.embedding).to(dtype)
        for layer in self.layers:
            q, k, v = before(
                x_TD, layer.attention_norm, layer.qkv, layer.query_norm, layer.key_norm, cos, sin,
                s.heads, s.kv_heads, s.norm_eps,
            )  # fmt: skip
            y = attend(q, k, v)
            x_TD = after(x_TD, y, layer.output, layer.ffn_norm, layer.gate_up, layer.down, s.norm_eps)
        return x_TD

    def loss(self, x_TD: Tensor, targets_T: Tensor, weights_T: Tensor) -> tuple[Tensor, Tensor]:
        """See `token_loss`."""
        return self.compiled[2](x_TD, self.final_norm, self.head, targets_T, weights_T, self.sizes.norm_eps)

    def logits(self, x_MD: Tensor) -> Tensor:
        """float32 logits [M, V] of chosen rows."""
        return F.linear(rms_norm(x_MD, self.final_norm, self.sizes.norm_eps), self.head.to(x_MD.dtype)).float()

    @property
    def num_parameters(self) -> int:
        """Elements of all weights."""
        return sum(parameter.numel() for parameter in self.parameters())

    def describe(self) -> dict[str, object]:
        """Sizes for the records."""
        return {**asdict(self.sizes), "parameters": self.num_parameters}
