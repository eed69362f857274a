"""Generation with FOCUS and with delayed caches in float64, one request at a time, written from the paper.

Liang et al., "DLLMs Know How to Tame Their Compute Bound": algorithm 1, equations 2 to 5 and 15 to 19, sections 4.2, 4.3, E.2.2
and E.3; where presets differ from it, the published implementation. A finished block is committed by a pass of its own. Nothing
here is shared with the library but names of weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from mosaic.models.architecture import Architecture
from mosaic.models.policies.focus_options import Eviction

__all__ = ["Dual", "Experts", "Generated", "StatedStep"]

FIRST_CUT = 1
"""The layer from whose attention on evicted rows are left out."""


class StatedStep(NamedTuple):
    """The outcome of a step of a block, by position."""

    computed: list[int]
    kept: list[int]
    decided: dict[int, int]


@dataclass
class Generated:
    """One request's generation.

    Parameters
    ----------
    tensors
        float64, by checkpoint name.
    selected
        Keys of the prefix that steps after a block's first attend to, in layers that are not exact; 0: all.
    every
        Steps of a block after which one attends to all keys, and selects, as its first does; 0: none.
    rows
        Rows of a tile of the block that has sets of its own; 0: all rows share theirs.

    Attributes
    ----------
    steps
        Of all blocks, in order.
    noise
        Of an eviction at random, the number of a step of blocks and a position: tokens with the largest are kept.
    written
        The number of the step that wrote the keys of a layer and position last; -1: a commit or a prefill.
    """

    arch: Architecture
    tensors: Mapping[str, Tensor]
    prompt: Tensor
    gen_length: int
    threshold: float
    quotas: list[int]
    dynamic: bool = True
    eviction: Eviction | None = None
    cache: str | None = None
    commit: str = "exact"
    selected: int = 0
    exact_layers: int = 2
    every: int = 0
    rows: int = 0
    noise: Callable[[int, int], float] = lambda step, place: math.nan
    steps: list[StatedStep] = field(default_factory=list)
    written: dict[tuple[int, int], int] = field(default_factory=dict)
    keys: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    history: list[int] = field(default_factory=list)
    sets: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)

    def run(self) -> Tensor:
        """The answer's tokens."""
        block, count = self.arch.block, len(self.prompt)
        length = -(-(count + self.gen_length) // block) * block
        self.tokens = torch.cat([self.prompt, torch.full((length - count,), self.arch.mask_token_id)])
        self.masked = torch.arange(length) >= count
        prefix = count // block * block
        for start in range(0, prefix, block):
            logits = self.forward(list(range(start, start + block)), start + block, None)
        if self.arch.shifted and prefix == count:
            self.first_of(prefix, logits)
        for start in range(prefix, length, block):
            self.block(start, last=start + block == length)
            if not self.masked[count : count + self.gen_length].any():
                break
        return self.tokens[count : count + self.gen_length]

    def block(self, start: int, *, last: bool) -> None:
        places = list(range(start, start + self.arch.block))
        frozen: set[int] = set()
        self.reached, self.start, self.of_block = start, start, list[int]()
        while any(self.masked[places]):
            computed = [place for place in places if place not in frozen]
            logits = self.forward(computed, start + len(places), len(self.of_block))
            before = self.masked.clone()
            self.steps.append(StatedStep(computed, sorted(logits), self.decide(logits)))
            self.of_block.append(len(self.steps[-1].decided))
            self.history.append(len(self.steps[-1].decided))
            for place in computed:
                beside = place == places[-1] or not before[place + 1]
                if self.cache and not before[place] and (beside or self.cache == "dc"):
                    frozen.add(place)
            if not self.masked[len(self.prompt) : len(self.prompt) + self.gen_length].any():
                return
        if not last:
            again = [place for place in places if self.commit == "exact" or place not in frozen]
            logits = self.forward(again, start + len(places), None)
            if self.arch.shifted:
                self.first_of(start + len(places), logits)

    def first_of(self, start: int, logits: dict[int, Tensor]) -> None:
        """Where a token's row predicts the next one, a block's last one decides the next block's first."""
        self.tokens[start], self.masked[start] = logits[start - 1].argmax(), False

    def decide(self, logits: dict[int, Tensor]) -> dict[int, int]:
        if self.arch.shifted:
            logits = {place + 1: row for place, row in logits.items() if place + 1 < self.start + self.arch.block}
        open_ = [place for place in sorted(logits) if self.masked[place]]
        score = {place: float(logits[place].softmax(0).max()) for place in open_}
        quota = self.quotas[min(len(self.of_block), len(self.quotas) - 1)]
        best = sorted(open_, key=lambda place: (-score[place], place))[:quota]
        sure = [place for place in open_ if score[place] > self.threshold]
        taken = sure if self.dynamic and len(sure) >= quota else best
        for place in taken:
            assert self.masked[place]
            self.tokens[place], self.masked[place] = logits[place].argmax(), False
        return {place: int(self.tokens[place]) for place in taken}

    # --- the model ----------------------------------------------------------------------------------------------------

    def weight(self, name: str, layer: int = 0) -> Tensor:
        return self.tensors[getattr(self.arch.names, name).format(layer=layer)]

    def projected(self, h: Tensor, name: str, layer: int) -> Tensor:
        y = h @ self.weight(name, layer).T
        if self.arch.attention.qkv_bias:
            stem = getattr(self.arch.names, name).format(layer=layer).removesuffix("weight")
            y = y + self.tensors[f"{stem}bias"]
        return y.view(len(h), -1, self.arch.attention.head_size)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.arch.norm_eps).rsqrt() * weight

    def turned(self, x: Tensor, places: list[int]) -> Tensor:
        size = self.arch.rotary.dim
        frequencies = self.arch.rotary.theta ** (-torch.arange(0, size, 2).double() / size)
        angles = (torch.tensor(places)[:, None] * frequencies)[:, None]
        a, b = x[..., :size].chunk(2, dim=-1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), x[..., size:]], -1)

    def forward(self, places: list[int], end: int, step: int | None) -> dict[int, Tensor]:
        """Logits by position of the tokens that are kept; keys up to `end` are seen. `step`: of a block; None: no eviction."""
        arch, kept, importance = self.arch, places, list[Tensor]()
        evicts = self.eviction is not None and step is not None
        number = -1 if step is None else len(self.steps)
        x = self.weight("embedding")[self.tokens[places]]
        for layer in range(arch.layers):
            q, k, v = self.queries_keys_values(x, layer, kept)
            for row, place in enumerate(kept):
                self.keys[layer, place], self.written[layer, place] = (k[row], v[row]), number
            if evicts and layer <= FIRST_CUT:
                importance.append(self.importance(layer, dict(zip(kept, q, strict=True))))
            if evicts and layer == FIRST_CUT:
                chosen = self.keep(places, importance[1] - importance[0])
                self.reached = end = max(self.reached, chosen[-1] + 1)
                rows = [places.index(place) for place in chosen]
                kept, x, q = chosen, x[rows], q[rows]
            k, v = (torch.stack([self.keys[layer, place][part] for place in range(end)]) for part in (0, 1))
            group = arch.attention.heads // arch.attention.kv_heads
            scores = torch.einsum("tnh,snh->nts", q, k.repeat_interleave(group, 1)) * arch.attention.head_size**-0.5
            if arch.block:
                blocks = torch.arange(end) // arch.block
                scores = scores.masked_fill(blocks > torch.tensor(kept)[:, None] // arch.block, -math.inf)
            if step is not None and self.selected and self.start and layer >= self.exact_layers:
                first = step == 0 or bool(self.every and step % self.every == 0)
                scores = self.sparse(layer, kept, scores, first=first)
            y = torch.einsum("nts,snh->tnh", scores.softmax(-1), v.repeat_interleave(group, 1)).flatten(1)
            x = self.fed_on(x, y, layer)
        return dict(zip(kept, self.logits(x), strict=True))

    def queries_keys_values(self, x: Tensor, layer: int, places: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        h = self.norm(x, self.weight("attention_norm", layer))
        q, k, v = (self.projected(h, name, layer) for name in ("query", "key", "value"))
        if self.arch.attention.head_norms:
            q, k = self.norm(q, self.weight("query_norm", layer)), self.norm(k, self.weight("key_norm", layer))
        return self.turned(q, places), self.turned(k, places), v

    def fed_on(self, x: Tensor, y: Tensor, layer: int) -> Tensor:
        """The part of a layer after its attention `y`."""
        x = x + y @ self.weight("output", layer).T
        return x + self.fed(layer, self.norm(x, self.weight("ffn_norm", layer)))

    def logits(self, x: Tensor) -> Tensor:
        return self.norm(x, self.weight("final_norm")) @ self.weight("embedding" if self.arch.tied else "head").T

    def fed(self, layer: int, h: Tensor) -> Tensor:
        return self.gated(h, *(self.weight(name, layer) for name in ("gate", "up", "down")))

    def gated(self, h: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return (torch.nn.functional.silu(h @ gate.T) * (h @ up.T)) @ down.T

    def sparse(self, layer: int, places: list[int], scores: Tensor, *, first: bool) -> Tensor:
        """MAGE (Kwon et al. 2026), equation 3: the block's first step attends to all keys, and selects for each key-value head and
        tile of rows, by all rows where a tile has none; the others attend to these keys of the prefix, and to the block."""
        group, rows = self.arch.attention.heads // self.arch.attention.kv_heads, self.rows or self.width
        tiles = torch.tensor(places) % self.width // rows
        for head, tile in product(range(self.arch.attention.kv_heads), range(-(-self.width // rows))):
            own, mine = slice(head * group, (head + 1) * group), tiles == tile
            if first:
                voting = scores[own][:, mine] if mine.any() else scores[own]
                mass = voting[..., : self.start].softmax(-1).mean((0, 1)).tolist()
                best = sorted(range(self.start), key=lambda place: (-mass[place], place))
                self.sets[layer, head, tile] = best[: self.selected]
            else:
                left = torch.ones(self.start, dtype=torch.bool)
                left[self.sets[layer, head, tile]] = False
                scores[own, :, : self.start] = scores[own, :, : self.start].masked_fill(left & mine[:, None], -math.inf)
        return scores

    # --- what is kept -------------------------------------------------------------------------------------------------

    @property
    def width(self) -> int:
        """The length of a block."""
        return self.arch.block

    def listed(self) -> list[int]:
        assert self.eviction is not None
        places = range(self.start, self.start + self.width)
        return [place for place in places if self.eviction.importance == "block" or self.masked[place]]

    def importance(self, layer: int, queries: dict[int, Tensor]) -> Tensor:
        """Equations 2 and 15."""
        assert self.eviction is not None
        group, reach, listed = (
            self.arch.attention.heads // self.arch.attention.kv_heads,
            self.eviction.pool // 2,
            self.listed(),
        )
        found = torch.zeros(len(listed), dtype=torch.float64)
        for place in queries.keys() & set(listed):
            for head in range(self.arch.attention.heads):
                keys = torch.stack([self.keys[layer, other][0][head // group] for other in listed])
                scores = (keys @ queries[place][head] * self.arch.attention.head_size**-0.5).tolist()
                pooled = [max(scores[max(at - reach, 0) : at + reach + 1]) for at in range(len(scores))]
                found += torch.tensor(pooled, dtype=torch.float64).softmax(0)
        return found

    def keep(self, places: list[int], delta: Tensor) -> list[int]:
        """Algorithm 1 from line 7 to 18, and section 4.2."""
        chosen = self.eviction
        assert chosen is not None
        rises = dict(zip(self.listed(), delta.tolist(), strict=True))
        masked = [place for place in places if self.masked[place]]
        if chosen.first_step == "whole" and not self.of_block:
            return places
        sample = [rises[place] for place in masked] if chosen.threshold == "mean" else [*rises.values()]
        middle = sum(sample) / len(sample) if chosen.threshold == "mean" else 0.0
        deviation = math.sqrt(sum((rise - middle) ** 2 for rise in sample) / len(sample))
        above = [place for place in masked if rises[place] >= middle + deviation]
        count = max(math.ceil(Fraction(str(chosen.alpha)) * self.expected()), len(above))
        ranks = (
            rises if chosen.rank == "importance" else {place: -rise for place, rise in rises.items()}
        )  # table 3: bottom
        if chosen.rank == "random":
            ranks = {place: self.noise(len(self.steps), place) for place in masked}
        selected = sorted(masked, key=lambda place: (-ranks[place], place))[: chosen.keep or count]
        kept = {place for place in places if place not in masked or place in selected or place + 1 in selected}
        before = max(kept)
        kept |= {place for place in masked if place < before and place >= self.reached}
        if chosen.placeholders == "masked":
            before = max(place for place in kept if self.masked[place])
            kept |= {place for place in masked if place < before}
        return sorted(kept)

    def expected(self) -> Fraction:
        """Tokens that a step is expected to decode."""
        chosen = self.eviction
        assert chosen is not None
        counts = [Fraction(n) for n in (self.of_block if chosen.history == "block" else self.history)]
        if not counts:
            return Fraction(1)
        average = sum(counts, Fraction()) / len(counts)
        if chosen.history == "ema":
            average = counts[0]
            for n in counts[1:]:
                average += Fraction(str(chosen.weight)) * (n - average)
        return max(average, Fraction(1))


@dataclass
class Experts(Generated):
    """LLaDA2.0: of each token the experts with the highest sigmoids, from the best groups, beside one that all tokens pass."""

    def fed(self, layer: int, h: Tensor) -> Tensor:
        arch, names = self.arch, self.arch.names
        parts = ("gate", "up", "down")
        if not arch.stack[layer].feed_forward.experts:
            return self.gated(h, *(self.tensors[names.dense.format(layer=layer, part=part)] for part in parts))
        y = self.gated(h, *(self.tensors[names.shared.format(layer=layer, part=part)] for part in parts))
        ffn = arch.feed_forward
        stack = f"{{0:{ffn.experts}}}"
        of_experts = [self.tensors[getattr(names, part).format(layer=layer, experts=stack)] for part in parts]
        scores = (h @ self.weight("router", layer).T).sigmoid().tolist()
        bias, width = self.weight("router_bias", layer).tolist(), ffn.experts // ffn.groups
        for row, score in enumerate(scores):
            rank = [mine + more for mine, more in zip(score, bias, strict=True)]
            groups = [rank[first : first + width] for first in range(0, ffn.experts, width)]
            order = sorted(range(len(groups)), key=lambda group: -sum(sorted(groups[group])[-2:]))
            allowed = [expert for expert in range(ffn.experts) if expert // width in order[: ffn.top_groups]]
            chosen = sorted(allowed, key=lambda expert: -rank[expert])[: ffn.experts_per_token]
            for expert in chosen:
                share = ffn.scale * score[expert] / sum(score[one] for one in chosen)
                y[row] += share * self.gated(h[row], *(matrices[expert] for matrices in of_experts))
        return y


@dataclass
class Dual(Generated):
    """Fast-dLLM's dual cache on LLaDA: a block's first step computes the whole canvas, the others the block, over its keys.

    These others evict; history is theirs alone.
    """

    own_block: int = 8

    @property
    def width(self) -> int:
        return self.own_block

    def run(self) -> Tensor:
        count = len(self.prompt)
        length = count + self.gen_length
        self.tokens = torch.cat([self.prompt, torch.full((self.gen_length,), self.arch.mask_token_id)])
        self.masked = torch.arange(length) >= count
        self.reached = length
        for start in range(count, length, self.width):
            self.start, self.of_block = start, list[int]()
            places = list(range(start, start + self.width))
            self.decide(self.forward(list(range(length)), length, None))
            while any(self.masked[places]):
                logits = self.forward(places, length, len(self.of_block))
                self.steps.append(StatedStep(places, sorted(logits), self.decide(logits)))
                self.of_block.append(len(self.steps[-1].decided))
                self.history.append(len(self.steps[-1].decided))
        return self.tokens[count:]

    def decide(self, logits: dict[int, Tensor]) -> dict[int, int]:
        """The most confident token of the block, and all that reach the threshold."""
        open_ = [
            place for place in sorted(logits) if self.masked[place] and self.start <= place < self.start + self.width
        ]
        score = {place: float(logits[place].softmax(0).max()) for place in open_}
        best = min(open_, key=lambda place: (-score[place], place))
        taken = [place for place in open_ if place == best or score[place] >= self.threshold]
        for place in taken:
            self.tokens[place], self.masked[place] = logits[place].argmax(), False
        return {place: int(self.tokens[place]) for place in taken}
