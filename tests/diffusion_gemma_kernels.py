"""The toy's own operators, on the CPU and in plain PyTorch: they allocate, as a newcomer's would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import gelu


def add(*, x: Tensor, y: Tensor, **_: Any) -> None:
    x.add_(y)


def scale(*, x: Tensor, factor: Tensor | None = None, factor_value: float = 1.0, **_: Any) -> None:
    x.mul_(factor_value if factor is None else factor)


def _normed(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def norm_to(*, x: Tensor, y: Tensor, eps: float, weight: Tensor | None = None, **_: Any) -> None:
    y.copy_(_normed(x, eps) if weight is None else _normed(x, eps) * weight)


def head_values(*, x: Tensor, y: Tensor, heads: int, eps: float, **_: Any) -> None:
    y.copy_(_normed(x.reshape(len(x), heads, -1), eps).view_as(x))


def gelu_mul(*, gate: Tensor, up: Tensor, **_: Any) -> None:
    gate.copy_(gelu(gate, approximate="tanh") * up)


def gelu_mul_packed(*, x: Tensor, y: Tensor, **_: Any) -> None:
    gate, up = x.tensor_split(2, dim=-1)
    y.copy_(gelu(gate, approximate="tanh") * up)


def scaled_route(
    *,
    x: Tensor,
    scale: Tensor,
    weight: Tensor,
    per_expert: Tensor,
    scores: Tensor,
    experts: Tensor,
    top_k: int,
    **_: Any,
) -> None:
    h = _normed(x, 1e-6) * scale * x.shape[-1] ** -0.5
    found, chosen = (h @ weight.float().T).softmax(-1).topk(top_k)
    scores.copy_(found / found.sum(-1, keepdim=True) * per_expert[chosen])
    experts.copy_(chosen)


def expert_sum(*, y: Tensor, order: Tensor, scores: Tensor, x: Tensor, **_: Any) -> None:
    rows = order // scores.shape[1]
    x.zero_().index_add_(0, rows, y * scores.view(-1)[order, None])


def cached_attention(
    *, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, y: Tensor, scale: float,
    causal: bool, window: int, heads: int, kv_heads: int, head_size: int, **_: Any,
) -> None:  # fmt: skip
    """`lengths` are the tokens of this step and those committed before; a layer keeps the last of them, row p mod rows."""
    before, rows = int(lengths[1]), keys.shape[0]
    old = torch.arange(max(before - rows, 0), before)
    new = before + torch.arange(len(k))
    at = torch.cat([old, new])
    group = heads // kv_heads
    all_k, all_v = (
        torch.cat([kept[old % rows], own]).view(len(at), kv_heads, head_size).repeat_interleave(group, dim=1)
        for kept, own in ((keys, k), (values, v))
    )
    scores = torch.einsum("qhd,khd->hqk", q.view(len(q), heads, head_size), all_k) * scale
    distance = new[:, None] - at
    hidden = (distance < 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window:
        hidden = hidden | (distance >= window)
    mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    y.copy_(torch.einsum("hqk,khd->qhd", mixed, all_v).reshape(y.shape))


def commit(*, k: Tensor, v: Tensor, lengths: Tensor, keys: Tensor, values: Tensor, **_: Any) -> None:
    at = int(lengths[1]) + torch.arange(len(k))[-len(keys) :]
    keys[at % len(keys)] = k[-len(keys) :]
    values[at % len(keys)] = v[-len(keys) :]


def softcap_tile(*, logits: Tensor, temperature: Tensor, scores: Tensor, cap: float, **_: Any) -> None:
    scores.copy_(cap * (logits / cap).tanh() / temperature)


def vocab_start(
    *,
    maximum: Tensor,
    total: Tensor,
    weighted: Tensor,
    token: Tensor,
    noisy: Tensor,
    sample: Tensor,
    soft: Tensor,
    **_: Any,
) -> None:
    maximum.fill_(-torch.inf)
    noisy.fill_(-torch.inf)
    for accumulator in (total, weighted, token, sample, soft):
        accumulator.zero_()


def noise(columns: Tensor, seed: Tensor) -> Tensor:
    """Gumbel noise of a token, the same in every row."""
    uniform = (torch.sin(columns.double() * 12.9898 + seed.double().sum()) * 43758.5453).frac().abs()
    return -(-uniform.clamp(1e-9, 1 - 1e-9).log()).log()


def vocab_tile_update(
    *, scores: Tensor, table: Tensor, seed: Tensor, maximum: Tensor, total: Tensor, weighted: Tensor, token: Tensor,
    noisy: Tensor, sample: Tensor, soft: Tensor, row_start: int, **_: Any,
) -> None:  # fmt: skip
    found, best = scores.max(-1)
    token.copy_(torch.where(found > maximum, best + row_start, token))
    top = torch.maximum(found, maximum)
    shrink, weights = (maximum - top).exp(), (scores - top[:, None]).exp()
    total.copy_(total * shrink + weights.sum(-1))
    weighted.copy_(weighted * shrink + (weights * scores).sum(-1))
    soft.copy_(soft * shrink[:, None] + weights @ table.float())
    maximum.copy_(top)
    drawn, at = (scores + noise(row_start + torch.arange(scores.shape[1]), seed).float()).max(-1)
    sample.copy_(torch.where(drawn > noisy, at + row_start, sample))
    noisy.copy_(torch.maximum(drawn, noisy))


def vocab_finish(*, maximum: Tensor, total: Tensor, weighted: Tensor, soft: Tensor, entropy: Tensor, **_: Any) -> None:
    entropy.copy_(total.log() + maximum - weighted / total)
    soft.div_(total[:, None])


KERNELS: Final[Mapping[str, Callable[..., None]]] = {
    kernel.__name__: kernel
    for kernel in (
        add, scale, norm_to, head_values, gelu_mul, gelu_mul_packed, scaled_route, expert_sum, cached_attention, commit,
        softcap_tile, vocab_start, vocab_tile_update, vocab_finish,
    )
}  # fmt: skip
