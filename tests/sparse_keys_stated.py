"""Sparse keys stated apart from Mosaic: a loop over one canvas in float64, position by position and head by head.

`fast_dllm` of `test_decoding` with the keys of the context cut down as dLLM-Serve describes it (sections 2.3 and 4.5); and windowed
refreshes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from math import floor
from typing import Any

import torch
from reference_runner import Network, factor_count
from test_decoding import Draw, best, canvas_of, shifted, spread
from torch import Tensor

Kept = list[list[list[tuple[int, Tensor, Tensor]]]]
"""Of every layer and key-value head, what is attended to outside the window: positions, keys and values."""


@dataclass
class Options:
    retention: float = 0.5
    selection: str = "head-centric"
    group: str = "max"
    pool: int = 3
    interval: int = 1
    delay: int = 0
    sample: float | None = None
    near: int = 32

    def outside(self, prompt: int) -> tuple[int, int]:
        """With `sample`, the positions before the answer's side, and their parts: all of one length, the fewest that are no shorter
        than the sample."""
        positions = max(prompt - self.near, 1)
        parts = 0
        while self.sample and parts < positions and (parts + 1) * Fraction(str(self.sample)) <= 1:
            parts += 1
        while parts and positions % parts:
            positions -= 1
        return positions, parts


@dataclass
class Forward:
    """One forward of a window: the logits of its rows, and queries, keys and values by layer, [T, heads, H]."""

    logits: Tensor
    seen: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)


class Stated:
    """A network in float64."""

    def __init__(self, network: Network) -> None:
        self.tensors = {name: tensor.double() for name, tensor in network.tensors.items()}
        self.net, self.arch = Network(network.arch, self.tensors), network.arch

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.arch.norm_eps).sqrt() * self.tensors[name]

    def project(self, x: Tensor, name: str) -> Tensor:
        """Heads [T, N, H] of rows."""
        bias = self.tensors.get(name.removesuffix("weight") + "bias", torch.zeros(1, dtype=x.dtype))
        return (x @ self.tensors[name].T + bias).view(len(x), -1, self.arch.attention.head_size)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Dims i and i + H/2 are the parts of a complex number, turned by position / theta^(2i/H)."""
        half = self.arch.attention.head_size // 2
        speed = self.arch.rotary.theta ** -(torch.arange(half, dtype=torch.float64) / half)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * positions[:, None, None] * speed)
        return torch.cat([turned.real, turned.imag], -1)

    def forward(self, tokens: Tensor, rows: list[int], kept: Kept | None) -> Forward:
        """Tokens at some positions, which see themselves and, by head, what was kept of others."""
        arch, tensors = self.arch, self.tensors
        size, group = arch.attention.head_size, arch.attention.heads // arch.attention.kv_heads
        positions, seen = torch.tensor(rows), []
        x = tensors[arch.names.embedding][tokens]
        for layer in range(arch.layers):
            name = {n: getattr(arch.names, n).format(layer=layer) for n in
                    ("attention_norm", "ffn_norm", "query", "key", "value", "output", "gate", "up", "down")}  # fmt: skip
            normed = self.norm(x, name["attention_norm"])
            q, k, v = (self.project(normed, name[part]) for part in ("query", "key", "value"))
            q, k = self.rotate(q, positions), self.rotate(k, positions)
            seen.append((q, k, v))
            outputs = []
            for head in range(arch.attention.heads):
                own = [] if kept is None else kept[layer][head // group]
                own = [entry for entry in own if entry[0] not in rows]
                keys = torch.stack([*k[:, head // group], *(key for _, key, _ in own)])
                values = torch.stack([*v[:, head // group], *(value for _, _, value in own)])
                outputs.append((q[:, head] @ keys.T / size**0.5).softmax(-1) @ values)
            x = x + torch.cat(outputs, -1) @ tensors[name["output"]].T
            normed = self.norm(x, name["ffn_norm"])
            gate, up = (normed @ tensors[name[part]].T for part in ("gate", "up"))
            x = x + (torch.nn.functional.silu(gate) * up) @ tensors[name["down"]].T
        return Forward(self.net.unembed(self.norm(x, arch.names.final_norm)).float(), seen)

    def keep(
        self, found: Forward, rows: list[int], block: range, span: range, chosen: Options, before: Kept | None = None
    ) -> Kept:
        """What each head keeps of these rows: the best candidates, and the span. Of what was kept `before`, all at other positions
        stays, and it keeps as many candidates as it had."""
        kept: Kept = []
        for layer, (q, k, v) in enumerate(found.seen):
            heads, kv_heads, at_row = q.shape[1], k.shape[1], {p: row for row, p in enumerate(rows)}
            candidates = [p for p in rows if p not in span]
            mean = q[[at_row[p] for p in block]].mean(0)
            of_heads = [
                [float(mean[h] @ k[at_row[p], h * kv_heads // heads]) for p in candidates] for h in range(heads)
            ]
            kept.append([])
            for kv_head in range(kv_heads):
                own = of_heads[kv_head * heads // kv_heads : (kv_head + 1) * heads // kv_heads]
                if chosen.selection == "uniform":
                    totals = [sum(each) for each in zip(*(pooled(one, chosen.pool) for one in of_heads), strict=True)]
                elif chosen.selection == "uniform-published":
                    totals = pooled([sum(each) / heads for each in zip(*of_heads, strict=True)], chosen.pool)
                else:
                    combine = max if chosen.group == "max" else lambda each: sum(each) / len(each)
                    totals = pooled([combine(each) for each in zip(*own, strict=True)], chosen.pool)
                count, stays = max(1, floor(Fraction(str(chosen.retention)) * len(candidates))), []
                if before is not None:
                    count = len([p for p, _, _ in before[layer][kv_head] if p in candidates])
                    stays = [entry for entry in before[layer][kv_head] if entry[0] not in rows]
                order = sorted(range(len(candidates)), key=lambda at: (-totals[at], at))[:count]
                taken = [candidates[at] for at in order] + [*span]
                kept[-1].append([*stays, *((p, k[at_row[p], kv_head], v[at_row[p], kv_head]) for p in taken)])
        return kept

    def renew(self, kept: Kept, found: Forward, start: int) -> Kept:
        """The same, with a window's keys in place of those of its positions."""
        return [
            [
                [
                    (p, k[p - start, head], v[p - start, head]) if start <= p < start + len(k) else (p, key, value)
                    for p, key, value in own
                ]
                for head, own in enumerate(of_layer)
            ]
            for of_layer, (_, k, v) in zip(kept, found.seen, strict=True)
        ]

    def generate(
        self, prompt: Tensor, gen: int, block: int, chosen: Options, draw: Draw, *, threshold: float | None = None,
        factor: float | None = None, steps: int | None = None,
    ) -> tuple[Tensor, list[str]]:  # fmt: skip
        """Return the canvas and what each step was."""
        x, open_ = canvas_of(self.net, prompt, len(prompt) + gen)
        dreams, said, kept, span = self.arch.shifted, [], None, range(0)
        width, windowed = block * chosen.interval, 0
        for start in range(len(prompt), len(x), block):
            low = start - (start - len(prompt)) % width
            counts, number = spread(block, steps * block // gen) if steps else [], 0
            while left := [p for p in sorted(open_) if start <= p < start + block]:
                first = 0
                if start in span and chosen.sample is not None and number == 0 and start == low:
                    outside, parts = chosen.outside(len(prompt))
                    size = outside // parts if parts else 0
                    begin = (parts - 1 - windowed % parts) * size if parts else 0
                    rows, windowed = [*range(begin, begin + size), *span], windowed + 1
                    found = self.forward(x[rows], rows, kept)
                    kept = self.keep(found, rows, range(start, start + block), span, chosen, kept)
                    logits_at = {p: row for row, p in enumerate(rows)}
                    said.append("windowed")
                elif start in span or number > chosen.delay:
                    first = start - (dreams and start in open_)
                    found = self.forward(x[first : start + block], [*range(first, start + block)], kept)
                    logits_at = {p: p - first for p in range(first, start + block)}
                    kept = self.renew(kept, found, first)
                    said.append("reuse")
                else:
                    found, logits_at = self.forward(x, [*range(len(x))], None), {p: p for p in range(len(x))}
                    said.append("full_step" if number < chosen.delay else "refresh")
                    if number == chosen.delay:
                        span = range(low, min(low + width, len(x)))
                        if chosen.sample is not None:
                            span = range(chosen.outside(len(prompt))[0], len(x))
                        kept = self.keep(found, [*range(len(x))], range(start, start + block), span, chosen)
                logits = shifted(found.logits) if dreams else found.logits
                drawn = {p: draw(logits[logits_at[p]], len(said) - 1, p) for p in left}
                scores: dict[int, Any] = {p: score for p, (_, score) in drawn.items()}
                ranked = best(scores, len(left))
                if number == 0 and dreams:
                    taken = [start]
                elif factor is not None:
                    taken = ranked[: factor_count([float(scores[p]) for p in ranked], factor)]
                elif threshold is not None:
                    taken = ranked[:1] + [p for p in ranked[1:] if scores[p] >= torch.tensor(threshold)]
                else:
                    taken = ranked[: counts.pop(0)]
                for p in taken:
                    x[p] = drawn[p][0]
                    open_.remove(p)
                number += 1
        return x, said


def pooled(scores: list[float], width: int) -> list[float]:
    """The largest of the scores around each."""
    return [max(scores[max(at - width // 2, 0) : at + width // 2 + 1]) for at in range(len(scores))]
