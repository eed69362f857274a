"""Block diffusion with sparse attention, stated in float64 from the papers: what it computes and decides, key by key."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import accumulate
from typing import Any

import torch
from test_session import FAMILIES
from torch import Tensor

from mosaic.decoding.llada import schedule
from mosaic.models.policies.mage_options import SparseAttention
from mosaic.runtime.compiled import CompiledModel

LAYERS, HEADS, KV_HEADS, SIZE, BLOCK, MASK = 4, 4, 2, 8, 4, 63
CONFIG: dict[str, Any] = {
    **FAMILIES["sdar"], "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE, "block_size": BLOCK, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64,
    "mask_token_id": MASK, "eos_token_id": 62,
}  # fmt: skip


class Plain:
    """SDAR in float64, a block at a time: MAGE's Algorithm 1 with the keys of finished blocks in lists.

    Written from the paper (arXiv 2602.14209, section 4): in a block's first step exact attention, and of each sparse layer and
    set the k keys of the prefix with the highest mean of the softmax over the prefix; later steps attend to these and the block.
    """

    def __init__(self, model: CompiledModel, attention: SparseAttention | None, prompt: Tensor) -> None:
        self.w = {name: view.double() for name, view in model.weights().items()}
        self.arch, self.attention = model.architecture, attention
        self.keys: list[list[Tensor]] = [[] for _ in range(LAYERS)]  # by layer and position, [2, K, H]
        self.sets: dict[tuple[int, int, int], list[int]] = {}  # by layer, query head and row of the block
        self.sparsely = 0

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.arch.norm_eps).rsqrt() * weight

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        frequencies = self.arch.rotary.theta ** (-torch.arange(0, SIZE, 2).double() / SIZE)
        angles = (positions[:, None] * frequencies)[:, None]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def forward(self, ids: Tensor, start: int, mode: str) -> Tensor:
        """Logits of a block of tokens from `start` on, whose keys and values are kept.

        `mode` is exact, sparse, capture (exact, and to select beside that), select (to attend to what is selected just before),
        or carry (to attend to what the block before had selected, and to select).
        """
        w, names = self.w, self.arch.names
        positions = torch.arange(start, start + len(ids))
        h = w[names.embedding][ids]
        for layer in range(LAYERS):
            x = self.norm(h, w[names.attention_norm.format(layer=layer)])
            q, k, v = (
                (x @ w[name.format(layer=layer)].T).view(len(ids), -1, SIZE)
                for name in (names.query, names.key, names.value)
            )
            q = self.turned(self.norm(q, w[names.query_norm.format(layer=layer)]), positions)
            k = self.turned(self.norm(k, w[names.key_norm.format(layer=layer)]), positions)
            self.keys[layer][start : start + len(ids)] = list(torch.stack([k, v], 1))
            whole = kept = torch.stack(self.keys[layer][: start + len(ids)])
            sparse = self.is_sparse(layer)
            if sparse and mode in ("capture", "select"):
                self.select(layer, q, kept, start)
            heads = self.attended(layer, q, kept, start, mode)
            if sparse and mode == "carry":
                self.select(layer, q, whole, start)
            h = h + torch.cat(heads, 1) @ w[names.output.format(layer=layer)].T
            x = self.norm(h, w[names.ffn_norm.format(layer=layer)])
            gate, up, down = (w[getattr(names, part).format(layer=layer)] for part in ("gate", "up", "down"))
            h = h + (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
        return self.norm(h, w[names.final_norm]) @ w[names.head].T

    def is_sparse(self, layer: int) -> bool:
        chosen = self.attention
        return chosen is not None and chosen.exact_layers <= layer < LAYERS - chosen.exact_last

    def attended(self, layer: int, q: Tensor, kept: Tensor, start: int, mode: str) -> list[Tensor]:
        """The keys that each query head attends to."""
        heads = []
        for head in range(HEADS):
            k, v = kept[:, :, head // (HEADS // KV_HEADS)].unbind(1)
            if not (self.is_sparse(layer) and mode in ("select", "sparse", "carry")):
                heads.append(torch.softmax(q[:, head] @ k.T * SIZE**-0.5, -1) @ v)
                continue
            own, found = list(range(start - (BLOCK if mode == "carry" else 0), len(kept))), []
            for row in range(len(q)):
                keys = self.sets[layer, head, row] + own
                found.append(torch.softmax(q[row, head] @ k[keys].T * SIZE**-0.5, -1) @ v[keys])
            heads.append(torch.stack(found))
        return heads

    def select(self, layer: int, q: Tensor, kept: Tensor, start: int) -> None:
        chosen = self.attention
        assert chosen is not None
        shared = HEADS // KV_HEADS if chosen.per == "kv_head" else 1
        voters = [row for row in range(BLOCK) if chosen.voters == "block" or start + row >= self.prompt_len]
        for first in range(0, BLOCK, chosen.rows or BLOCK):
            tile = range(first, min(first + (chosen.rows or BLOCK), BLOCK))
            mine = [row for row in tile if row in voters] or voters
            for head in range(0, HEADS, shared):
                keys = kept[:start, 0, head // (HEADS // KV_HEADS)]
                found = self.best(q[mine, head : head + shared].flatten(0, 1), keys)
                self.sets |= {(layer, member, row): found for member in range(head, head + shared) for row in tile}

    def best(self, rows: Tensor, keys: Tensor) -> list[int]:
        """The keys of a prefix that rows and heads select together."""
        chosen, start = self.attention, len(keys)
        assert chosen is not None
        if chosen.by == "bounds":
            return self.best_pages(rows, keys)
        p = torch.softmax(rows @ keys.T * SIZE**-0.5, -1)
        mass = {"mean": p.mean(0), "max": p.amax(0), "worst": p.amin(0)}[chosen.statistic]
        pages = [float(mass[at : at + chosen.page].sum()) for at in range(0, start, chosen.page)]
        count = chosen.k // chosen.page
        if chosen.ratio:
            count = min(count, -(-math.ceil(Fraction(str(chosen.ratio)) * start) // chosen.page))
        ranked = sorted(range(len(pages)), key=lambda page: -pages[page])[:count]
        if chosen.mass:
            sums = accumulate((pages[page] for page in ranked), initial=0.0)
            ranked = [page for page, before in zip(ranked, sums, strict=False) if before < chosen.mass]
        return [j for page in sorted(ranked) for j in range(page * chosen.page, min((page + 1) * chosen.page, start))]

    def best_pages(self, rows: Tensor, keys: Tensor) -> list[int]:
        """Quest (arXiv 2406.10774, section 3): keys of the whole pages with the highest upper bounds, and all behind these."""
        chosen, page = self.attention, 0 if self.attention is None else self.attention.page
        assert chosen is not None
        bounds = []
        for at in range(0, len(keys) // page * page, page):
            least, largest = keys[at : at + page].amin(0), keys[at : at + page].amax(0)
            upper = torch.maximum(rows * least, rows * largest).sum(1)
            bounds.append(float({"mean": upper.mean(), "max": upper.max(), "worst": upper.min()}[chosen.statistic]))
        count = chosen.k // page
        if chosen.ratio:
            count = min(count, math.ceil(Fraction(str(chosen.ratio)) * len(bounds)))
        best = sorted(sorted(range(len(bounds)), key=lambda number: -bounds[number])[:count])
        found = [j for number in best for j in range(number * page, (number + 1) * page)]
        return [*found, *range(len(bounds) * page, len(keys))]

    def generate(self, prompt: Tensor, gen_length: int, steps: int) -> Tensor:
        """Greedy decoding with SDAR's static schedule: a fixed number of the most confident masks per step."""
        self.prompt_len = len(prompt)
        length = -(-(len(prompt) + gen_length) // BLOCK) * BLOCK
        tokens = torch.cat([prompt, torch.full((length - len(prompt),), MASK)])
        first = len(prompt) // BLOCK * BLOCK
        for start in range(0, first, BLOCK):
            self.forward(tokens[start : start + BLOCK], start, "exact")
        for start in range(first, length, BLOCK):
            carries = self.attention is not None and self.attention.carried and start > first
            if start > first:
                self.forward(tokens[start - BLOCK : start], start - BLOCK, "sparse" if carries else "exact")
            open_ = torch.arange(start, start + BLOCK) >= len(prompt)
            for step, quota in enumerate(schedule(BLOCK, steps)):
                if not open_.any():
                    break
                logits = self.denoise(tokens[start : start + BLOCK], start, step, steps, carries=carries)
                score, token = torch.softmax(logits, -1).max(-1)
                best = torch.where(open_, score, -1.0).argsort(descending=True, stable=True)[:quota]
                best = best[open_[best]]
                tokens[start + best] = token[best]
                open_[best] = False
        return tokens[len(prompt) : len(prompt) + gen_length]

    def denoise(self, ids: Tensor, start: int, step: int, steps: int, *, carries: bool) -> Tensor:
        """Logits of a step of a block."""
        selects = "" if self.attention is None else self.attention.selects
        self.sparsely += 1
        exactly = 1 if self.attention is None else max(math.ceil(self.attention.exact_steps * steps), 1)
        every = 0 if self.attention is None else self.attention.every
        captures = step < exactly or self.sparsely == every
        if captures:
            self.sparsely = 0
        mode = {"": "exact", "every": "select", "first": "capture" if captures else "sparse"}[selects]
        return self.forward(ids, start, "carry" if carries and not step else mode)
