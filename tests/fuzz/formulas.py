"""Each operator in float64, written from the formulas of the records: no kernel is called.

Every function takes operands by name and gives the values of what the op writes, or of what it updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

UPDATES: Final[Mapping[str, str]] = {
    "linear_add": "y", "split_linear_add": "y", "silu_mul": "gate", "rotary": "x", "head_norm": "x", "guide": "x",
    "moe_combine": "x", "kv_store": "kv",
}  # fmt: skip
"""The operand that an op overwrites."""
WHOLE: Final[Mapping[str, frozenset[str]]] = {
    "attention": frozenset({"k", "v"}), "gather_rows": frozenset({"x"}),
    "split_linear_add": frozenset({"arrivals"}), "kv_store": frozenset({"kv", "extents", "cu_extents", "cu_seqlens"}),
    "kv_attention": frozenset({"kv", "extents", "cu_extents", "seen", "cu_seqlens"}),
    "selected_attention": frozenset(
        {"kv", "extents", "cu_extents", "selected", "owner", "captured", "seen", "cu_seqlens"}
    ),
}  # fmt: skip
"""Operands that loops never slice."""
READS: Final[Mapping[str, tuple[str, ...]]] = {
    "linear": ("x", "weight", "bias"), "linear_add": ("x", "weight", "y"), "rms_norm": ("x", "weight"),
    "silu_mul": ("gate", "up"), "gather_rows": ("x", "rows"), "copy": ("x",), "embedding": ("ids", "table"),
    "rotary": ("x", "positions", "inv_freq"), "head_norm": ("x", "weight"), "guide": ("x", "uncond", "guidance"),
    "attention": ("q", "k", "v", "cu_seqlens"), "row_stats": ("logits",), "unembed_stats": ("x", "weight"),
    "shift_rows": ("rows", "cu_seqlens"), "moe_route": ("x", "weight", "bias"), "moe_sort": ("experts",),
    "moe_gather": ("x", "order"), "grouped_linear": ("x", "weight", "offsets"),
    "moe_combine": ("y", "order", "scores", "x"), "kv_store": ("k", "v", "kv", "extents", "cu_extents", "cu_seqlens", "positions"),
    "kv_attention": ("q", "kv", "extents", "cu_extents", "seen", "cu_seqlens", "positions"),
    "norm_gate_up": ("x", "norm", "gate", "up"), "split_linear_add": ("x", "weight", "y", "arrivals"), "zeros": (),
    "selected_attention": (
        "q", "kv", "extents", "cu_extents", "selected", "owner", "captured", "seen", "cu_seqlens", "positions"
    ),
}  # fmt: skip
"""Names of the operands, in call order."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor]:
    y = x @ weight.T
    return (y if bias is None else y + bias,)


def linear_add(x: Tensor, weight: Tensor, y: Tensor) -> tuple[Tensor]:
    return (y + x @ weight.T,)


def split_linear_add(x: Tensor, weight: Tensor, y: Tensor, arrivals: Tensor) -> tuple[Tensor]:
    """Operators that count arrivals leave them unchanged."""
    assert not arrivals.any()
    return linear_add(x, weight, y)


def zeros(*, count: int) -> tuple[Tensor]:
    return (torch.zeros(count, dtype=torch.int32),)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor]:
    return (x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight,)


def norm_gate_up(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, *, eps: float) -> tuple[Tensor]:
    (h,) = rms_norm(x, norm, eps=eps)
    return silu_mul(h @ gate.T, h @ up.T)


def head_norm(x: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor]:
    heads = x.reshape(x.shape[0], -1, weight.shape[0])
    return (rms_norm(heads, weight, eps=eps)[0].reshape(x.shape),)


def silu_mul(gate: Tensor, up: Tensor) -> tuple[Tensor]:
    return (gate / (1 + torch.exp(-gate)) * up,)


def gather_rows(x: Tensor, rows: Tensor) -> tuple[Tensor]:
    return (torch.stack([x[int(row)] for row in rows]),)


def embedding(ids: Tensor, table: Tensor) -> tuple[Tensor]:
    return gather_rows(table, ids)


def copy(x: Tensor) -> tuple[Tensor]:
    return (x.clone(),)


def rotary(x: Tensor, positions: Tensor, inv_freq: Tensor, *, head_size: int) -> tuple[Tensor]:
    """The angles are float32, as the contract says."""
    angle = positions.float()[:, None] * inv_freq.float()[None]
    cos, sin = angle.cos().double()[:, None], angle.sin().double()[:, None]
    heads = x.reshape(x.shape[0], -1, head_size).clone()
    half = inv_freq.shape[0]
    first, second = heads[..., :half].clone(), heads[..., half : 2 * half].clone()
    heads[..., :half], heads[..., half : 2 * half] = first * cos - second * sin, second * cos + first * sin
    return (heads.reshape(x.shape),)


def guide(x: Tensor, uncond: Tensor, guidance: Tensor) -> tuple[Tensor]:
    return (uncond + (guidance.double()[:, None] + 1) * (x - uncond),)


def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor,
    *, head_size: int, scale: float, span: int, block: int = 0, row_start: int = 0,
) -> tuple[Tensor]:  # fmt: skip
    y = torch.full_like(q, torch.nan)
    group = q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        row = row_start + i
        first = max(int(b) for b in cu_seqlens if int(b) <= row)
        last = min(int(b) for b in cu_seqlens if int(b) > row)
        if block:
            last = min(last, first + ((row - first) // block + 1) * block)
        y[i] = _attend(q[i], k[first:last], v[first:last], head_size, group, scale)
    return (y,)


def _attend(q: Tensor, k: Tensor, v: Tensor, head_size: int, group: int, scale: float) -> Tensor:
    """One row of queries over its keys, head by head."""
    heads = []
    for h in range(q.shape[0] // head_size):
        own = slice(h * head_size, (h + 1) * head_size)
        shared = slice(h // group * head_size, (h // group + 1) * head_size)
        heads.append(torch.softmax(k[:, shared] @ q[own] * scale, 0) @ v[:, shared])
    return torch.cat(heads)


def _places(kv: Tensor, extents: Tensor, heads: int, size: int, layer: int) -> dict[int, Tensor]:
    """By position, the view [2, K, H] of its key and value in one layer; of a sequence's extents a later one comes first."""
    found = {}
    for row, rows, first, before in extents.tolist():
        whole = kv.view(-1)[row * kv.shape[1] : (row + rows) * kv.shape[1]].view(-1, 2, heads, rows, size)[layer]
        found |= {first + i: whole[:, :, before + i] for i in range(rows - before)}
    return found


def _sequence(bounds: list[int], row: int) -> int:
    """The sequence that has a row."""
    return max(s for s in range(len(bounds) - 1) if bounds[s] <= row)


def kv_store(
    k: Tensor, v: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, cu_seqlens: Tensor, positions: Tensor,
    *, layer: int, head_size: int, row_start: int = 0,
) -> tuple[Tensor]:  # fmt: skip
    after, heads = kv.clone(), k.shape[1] // head_size
    for i, position in enumerate(positions.tolist()):
        b = _sequence(cu_seqlens.tolist(), row_start + i)
        mine = _places(after, extents[int(cu_extents[b]) : int(cu_extents[b + 1])], heads, head_size, layer)
        if position in mine:
            mine[position].copy_(torch.stack([k[i], v[i]]).view(2, heads, head_size))
    return (after,)


def kv_attention(
    q: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, seen: Tensor, cu_seqlens: Tensor, positions: Tensor,
    *, layer: int, kv_heads: int, head_size: int, scale: float, span: int, keys: int, block: int = 0, row_start: int = 0,
) -> tuple[Tensor]:  # fmt: skip
    y = torch.full_like(q, torch.nan)
    for i in range(q.shape[0]):
        b = _sequence(cu_seqlens.tolist(), row_start + i)
        mine = _places(kv, extents[int(cu_extents[b]) : int(cu_extents[b + 1])], kv_heads, head_size, layer)
        count = int(seen[b])
        if block:
            count = min(count, (int(positions[i]) // block + 1) * block)
        if count:
            rows = torch.stack([mine[j] for j in range(count)]).flatten(2)
            y[i] = _attend(q[i], rows[:, 0], rows[:, 1], head_size, q.shape[1] // (kv_heads * head_size), scale)
    return (y,)


def selected_attention(
    q: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, selected: Tensor, owner: Tensor, captured: Tensor, seen: Tensor,
    cu_seqlens: Tensor, positions: Tensor,
    *, layer: int, slot: int, sets: int, k: int, page: int, kv_heads: int, head_size: int, scale: float, attended: int,
    block: int = 0, row_start: int = 0,
) -> tuple[Tensor]:  # fmt: skip
    y = torch.full_like(q, torch.nan)
    members = q.shape[1] // (sets * head_size)
    for i in range(q.shape[0]):
        b = _sequence(cu_seqlens.tolist(), row_start + i)
        mine = _places(kv, extents[int(cu_extents[b]) : int(cu_extents[b + 1])], kv_heads, head_size, layer)
        count, prefix = int(seen[b]), int(captured[b])
        if block:
            count = min(count, (int(positions[i]) // block + 1) * block)
        for own in range(sets):
            row = selected[owner[b]].view(-1, 1 + k // page)[slot * sets + own].tolist()
            pages = row[1 : 1 + row[0]]
            keys = [j for j in range(count) if j >= prefix or j // page in pages]
            rows = torch.stack([mine[j][:, own * kv_heads // sets] for j in keys])
            part = slice(own * members * head_size, (own + 1) * members * head_size)
            y[i, part] = _attend(q[i, part], rows[:, 0], rows[:, 1], head_size, members, scale)
    return (y,)


def row_stats(logits: Tensor) -> tuple[Tensor, ...]:
    """Token, maximum, second largest, log-sum-exp, entropy."""
    top = torch.sort(logits, dim=1, descending=True, stable=True)
    total = logits.logsumexp(1)
    p = torch.softmax(logits, 1)
    entropy = -(p * torch.log_softmax(logits, 1)).sum(1)
    return top.indices[:, 0], top.values[:, 0], top.values[:, 1], total, entropy


def unembed_stats(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return row_stats(x @ weight.T)


def shift_rows(rows: Tensor, cu_seqlens: Tensor) -> tuple[Tensor]:
    first = [max(int(b) for b in cu_seqlens if int(b) <= row) for row in rows.tolist()]
    return (torch.maximum(rows - 1, torch.tensor(first, dtype=rows.dtype)),)


def moe_route(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, top_k: int, normalize: bool, scoring: str = "softmax"
) -> tuple[Tensor, Tensor]:
    logits = x @ weight.T
    score = torch.softmax(logits, 1) if scoring == "softmax" else 1 / (1 + torch.exp(-logits))
    ranked = torch.sort(score if bias is None else score + bias, dim=1, descending=True, stable=True).indices
    chosen = ranked[:, :top_k]
    scores = score.gather(1, chosen)
    return scores / scores.sum(1, keepdim=True) if normalize else scores, chosen


def moe_sort(experts: Tensor, *, num_experts: int) -> tuple[Tensor, Tensor]:
    flat = experts.reshape(-1).tolist()
    order = sorted(range(len(flat)), key=lambda i: flat[i])
    bounds = [sum(e < expert for e in flat) for expert in range(num_experts + 1)]
    return torch.tensor(order), torch.tensor(bounds)


def moe_gather(x: Tensor, order: Tensor, *, top_k: int) -> tuple[Tensor]:
    return (x[order // top_k],)


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> tuple[Tensor]:
    bounds = offsets.tolist()
    parts = [x[bounds[e] : bounds[e + 1]] @ weight[e].T for e in range(weight.shape[0])]
    return (torch.cat(parts),)


def moe_combine(y: Tensor, order: Tensor, scores: Tensor, x: Tensor) -> tuple[Tensor]:
    after, k = x.clone(), scores.shape[1]
    for place, assignment in enumerate(order.tolist()):
        after[assignment // k] += scores.reshape(-1)[assignment] * y[place]
    return (after,)


FORMULAS: Final[Mapping[str, Callable[..., tuple[Tensor, ...]]]] = {name: globals()[name] for name in READS}


def evaluate(kernel: str, operands: Mapping[str, Tensor], attrs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """The values that an op writes, or the one that it updates; floats are float64."""
    wide = {name: value.double() if value.is_floating_point() else value for name, value in operands.items()}
    return FORMULAS[kernel](**wide, **attrs)
