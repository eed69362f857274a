"""What a user has today: the official models' arithmetic in plain PyTorch, and the sampling of their published loops.

Logits of every row, then argmax and softmax confidence. The full-precision and in-dtype steps are where the published
files have them: norms in float32; LLaDA's rotary in float32, Dream's and LLaDA-MoE's in the model's dtype; softmax of
the logits in the model's dtype, of all rows (LLaDA, LLaDA-MoE) or of the masked rows of logits that were shifted by a
copy (Dream). Keys and values of grouped heads are repeated. Legend: S tokens, M masked, D hidden, V vocabulary, N query
heads, K key-value heads, H head size, E experts. The block-causal families attend under a boolean mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mosaic.models.architecture import Architecture
from mosaic.runtime.frequencies import inverse_frequencies
from mosaic.runtime.workspace import torch_dtype

__all__ = ["Experts", "Transformer", "grouped_products"]

Experts = Literal["grouped", "loop"]


def grouped_products(dtype: torch.dtype, device: torch.device | str) -> bool:
    """Tell whether PyTorch has a grouped product for this dtype on this device, as the experts of transformers use."""
    if dtype != torch.bfloat16 or torch.device(device).type != "cuda":
        return False
    return hasattr(torch, "_grouped_mm") and torch.cuda.get_device_capability() >= (9, 0)


class RMSNorm(nn.Module):
    """weight * (x / rms(x)), the quotient in float32 and cast back before the product."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight, requires_grad=False), eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Linear(nn.Module):
    """x @ weight.T + bias, on memory that is given."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Project the last axis."""
        return F.linear(x, self.weight, self.bias)


def rotate_half(x: Tensor) -> Tensor:
    """Return (-x2, x1) of the two halves of the last axis."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class Weights:
    """Memory for a model's tensors: made on demand, kept by checkpoint name, filled afterwards."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str) -> None:
        self.dtype, self.device = dtype, device
        self.tensors: dict[str, Tensor] = {}

    def make(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Give the memory of one tensor."""
        self.tensors[name] = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return self.tensors[name]


class Attention(nn.Module):
    """Bidirectional or block-causal attention through `scaled_dot_product_attention`."""

    def __init__(self, arch: Architecture, layer: int, weights: Weights) -> None:
        super().__init__()
        self.arch = arch
        names, width, kv_width = arch.names, arch.attention.width, arch.attention.kv_width

        def projection(name: str, columns: int) -> Linear:
            name = name.format(layer=layer)
            bias = weights.make(name.replace(".weight", ".bias"), columns) if arch.attention.qkv_bias else None
            return Linear(weights.make(name, columns, arch.hidden), bias)

        self.q, self.k, self.v = (
            projection(name, columns)
            for name, columns in ((names.query, width), (names.key, kv_width), (names.value, kv_width))
        )
        self.o = Linear(weights.make(names.output.format(layer=layer), arch.hidden, width))
        norms = (names.query_norm, names.key_norm) if arch.attention.head_norms else ()
        self.norms = nn.ModuleList(
            RMSNorm(weights.make(name.format(layer=layer), arch.attention.head_size), arch.norm_eps) for name in norms
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Attend: x [1, S, D] to [1, S, D]; cos, sin [S, R] of the R dims that turn; mask [S, S], true where seen."""
        arch, shape = self.arch, (*x.shape[:-1], -1, self.arch.attention.head_size)
        q, k, v = self.q(x).view(shape), self.k(x).view(shape), self.v(x).view(shape)
        if self.norms:
            q, k = self.norms[0](q), self.norms[1](k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        q, k = self.rotated(q, cos, sin), self.rotated(k, cos, sin)
        if arch.attention.kv_heads < arch.attention.heads:
            k, v = (part.repeat_interleave(arch.attention.heads // arch.attention.kv_heads, dim=1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        projected: Tensor = self.o(y.transpose(1, 2).reshape(*x.shape[:-1], -1))
        return projected

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first dims in the dtype of the angles, and give the model's back."""
        turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        wide = turning.to(cos.dtype)
        turned = (wide * cos + rotate_half(wide) * sin).to(x.dtype)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), by the names of the three."""

    def __init__(self, names: tuple[str, str, str], hidden: int, size: int, weights: Weights) -> None:
        super().__init__()
        gate, up, down = names
        self.gate, self.up = (Linear(weights.make(name, size, hidden)) for name in (gate, up))
        self.down = Linear(weights.make(down, hidden, size))

    def forward(self, x: Tensor) -> Tensor:
        """Feed x [1, S, D] forward."""
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class MixtureOfExperts(nn.Module):
    """The top experts' outputs by their float32 scores, and that of the shared expert where there is one.

    `loop` visits one expert after the other, as the published file; `grouped` sorts the tokens by expert and multiplies
    all at once, as transformers does today.
    """

    def __init__(self, arch: Architecture, layer: int, weights: Weights, how: Experts) -> None:
        super().__init__()
        self.ffn, self.how = arch.stack[layer].feed_forward, how
        ffn, names = self.ffn, arch.names
        many = ffn.experts
        self.router = Linear(weights.make(names.router.format(layer=layer), many, arch.hidden))
        self.bias: nn.Parameter | None = None
        if names.router_bias:
            bias = weights.make(names.router_bias.format(layer=layer), many, dtype=torch.float32)
            self.bias = nn.Parameter(bias, requires_grad=False)
        self.shared = _feed_forward(arch, names.shared, layer, ffn.shared, weights) if ffn.shared else None
        stack = f"{{0:{many}}}"
        self.gate, self.up, self.down = (
            nn.Parameter(weights.make(name.format(layer=layer, experts=stack), many, *shape), requires_grad=False)
            for name, shape in (
                (names.gate, (ffn.size, arch.hidden)),
                (names.up, (ffn.size, arch.hidden)),
                (names.down, (arch.hidden, ffn.size)),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """Mix for x [1, S, D]."""
        rows = x.reshape(-1, x.shape[-1])
        scores, chosen = self.routed(rows)
        mix = self.looped if self.how == "loop" else self.grouped
        mixed: Tensor = mix(rows, scores.to(x.dtype), chosen)
        if self.shared is not None:
            mixed = mixed + self.shared(rows)
        return mixed.view(x.shape)

    def routed(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and numbers of each row's experts."""
        ffn = self.ffn
        if ffn.scoring == "sigmoid":
            scores = F.linear(rows.float(), self.router.weight.float()).sigmoid()
        else:
            scores = self.router(rows).softmax(-1, dtype=torch.float32)
        choice = scores if self.bias is None else scores + self.bias
        if ffn.groups:
            grouped = choice.view(len(rows), ffn.groups, -1)
            total = grouped.topk(2, dim=-1).values.sum(-1)
            kept = torch.zeros_like(total).scatter(1, total.topk(ffn.top_groups, dim=-1).indices, 1)
            choice = grouped.masked_fill(kept.unsqueeze(-1) == 0, float("-inf")).flatten(1)
        weights, chosen = choice.topk(ffn.experts_per_token, dim=-1)
        if choice is not scores:
            weights = scores.gather(-1, chosen)
        if ffn.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * ffn.scale if ffn.scale != 1.0 else weights, chosen

    def looped(self, rows: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """Run one expert after the other."""
        result = torch.zeros_like(rows)
        hits = F.one_hot(chosen, self.ffn.experts).permute(2, 1, 0)
        for expert in range(self.ffn.experts):
            slot, token = torch.where(hits[expert])
            x = rows[token]
            y = F.linear(F.silu(F.linear(x, self.gate[expert])) * F.linear(x, self.up[expert]), self.down[expert])
            result.index_add_(0, token, y * scores[token, slot, None])
        return result

    def grouped(self, rows: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """Sort by expert, three grouped products, and back."""
        top_k = chosen.shape[-1]
        flat = chosen.reshape(-1)
        order = flat.argsort()
        bounds = torch.histc(flat.float(), self.ffn.experts, 0, self.ffn.experts - 1).cumsum(0, dtype=torch.int32)
        x = rows[order // top_k]
        gate, up = (torch._grouped_mm(x, weight.transpose(-2, -1), offs=bounds) for weight in (self.gate, self.up))
        y = torch._grouped_mm(F.silu(gate) * up, self.down.transpose(-2, -1), offs=bounds)
        y = y * scores.reshape(-1)[order, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        return y[back].view(-1, top_k, y.shape[-1]).sum(dim=1)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, arch: Architecture, layer: int, weights: Weights, experts: Experts) -> None:
        super().__init__()
        names = arch.names
        self.attention_norm, self.ffn_norm = (
            RMSNorm(weights.make(name.format(layer=layer), arch.hidden), arch.norm_eps)
            for name in (names.attention_norm, names.ffn_norm)
        )
        self.attention = Attention(arch, layer, weights)
        self.ffn: nn.Module
        ffn = arch.stack[layer].feed_forward
        if ffn.experts:
            self.ffn = MixtureOfExperts(arch, layer, weights, experts)
        elif names.dense:
            self.ffn = _feed_forward(arch, names.dense, layer, ffn.size, weights)
        else:
            gate, up, down = (name.format(layer=layer) for name in (names.gate, names.up, names.down))
            self.ffn = FeedForward((gate, up, down), arch.hidden, ffn.size, weights)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Run one block."""
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        y: Tensor = x + self.ffn(self.ffn_norm(x))
        return y


def _feed_forward(arch: Architecture, template: str, layer: int, size: int, weights: Weights) -> FeedForward:
    """A dense feed-forward of a model of experts: its first layers' or the one that all tokens share."""
    gate, up, down = (template.format(layer=layer, part=part) for part in ("gate", "up", "down"))
    return FeedForward((gate, up, down), arch.hidden, size, weights)


class Transformer(nn.Module):
    """One denoising step of a model that Mosaic ships, as its users run it.

    Parameters
    ----------
    arch
        Sizes, and the names that `tensors` goes by.
    dtype, device
        Of weights and activations; the architecture's dtype if not given.
    wide_rotary
        Rotate queries and keys in float32 (LLaDA) instead of in the model's dtype (Dream, LLaDA-MoE).
    experts
        How a mixture of experts is computed.

    Attributes
    ----------
    tensors
        The weights by checkpoint name, uninitialised: fill them in place. Experts are stacked, as in plans.
    """

    def __init__(
        self,
        arch: Architecture,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        wide_rotary: bool = False,
        experts: Experts = "loop",
    ) -> None:
        super().__init__()
        self.arch, self.wide_rotary = arch, wide_rotary
        self.dtype = dtype if dtype is not None else torch_dtype(arch.dtype)
        weights = Weights(self.dtype, device)
        self.embedding = nn.Parameter(
            weights.make(arch.names.embedding, arch.vocabulary, arch.hidden), requires_grad=False
        )
        self.layers = nn.ModuleList(Layer(arch, layer, weights, experts) for layer in range(arch.layers))
        self.norm = RMSNorm(weights.make(arch.names.final_norm, arch.hidden), arch.norm_eps)
        tied = weights.tensors[arch.names.embedding] if arch.tied else None
        self.head = Linear(tied if tied is not None else weights.make(arch.names.head, arch.vocabulary, arch.hidden))
        self.tensors: Mapping[str, Tensor] = weights.tensors

    def angles(self, tokens: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [S, R] of the R dims of a head that turn, in float32 and scaled as the model asks; those of
        positions from `first` on."""
        device, scale = self.embedding.device, self.arch.attention.rotary_scale
        inv_freq = inverse_frequencies(self.arch.rotary, tokens).to(device)
        angles = torch.outer(torch.arange(first, tokens, device=device, dtype=torch.float32), inv_freq)
        angles = torch.cat((angles, angles), dim=-1)
        kept = torch.promote_types(self.dtype, torch.float32) if self.wide_rotary else self.dtype
        return (angles.cos() * scale).to(kept), (angles.sin() * scale).to(kept)

    def mask(self, tokens: int) -> Tensor | None:
        """Return which keys a query sees [S, S], None where all: those of its block and of the blocks before."""
        if not self.arch.block:
            return None
        number = torch.arange(tokens, device=self.embedding.device) // self.arch.block
        return number[:, None] >= number[None, :]

    def logits(self, token_ids: Tensor) -> Tensor:
        """Return logits [1, S, V] of every row, before any shift."""
        x = F.embedding(token_ids, self.embedding)
        cos, sin = self.angles(token_ids.shape[1])
        mask = self.mask(token_ids.shape[1])
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        found: Tensor = self.head(self.norm(x))
        return found

    def forward(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Predict: token_ids [1, S] to the token and its confidence at the masked positions, [M] each."""
        masked = token_ids == self.arch.mask_token_id
        logits = self.logits(token_ids)
        if self.arch.shifted:
            logits = torch.cat([logits[:, :1], logits[:, :-1]], dim=1)
            confidence, token = logits[masked].softmax(-1).max(-1)
            return token, confidence
        token = logits.argmax(-1)
        confidence = logits.softmax(-1).gather(-1, token[..., None])[..., 0]
        return token[masked], confidence[masked]
