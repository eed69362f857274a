"""Generation as the public implementation of FOCUS does it, in float64, one request at a time.

sands-lab/FOCUS, which is LMDeploy with kernels and a scheduler of its own: what its forward pass, its selection, its delayed cache
and its scheduler do, in the order in which they do it. It needs its delayed cache (`cache` "dc+", `commit` "cached"); without, and
with "dc" and "exact", the same rules hold of the rows that are computed. Of the paper's statement this takes projections, norms,
rotation, feed-forwards and the rule by which rows are decided.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from focus_stated import Experts, Generated, StatedStep
from torch import Tensor

__all__ = ["Published", "PublishedExperts"]


@dataclass
class Published(Generated):
    """One request's generation. `eviction` gives `alpha` alone."""

    def run(self) -> Tensor:
        """The answer's tokens."""
        self.size, count = self.arch.block, len(self.prompt)
        wanted = slice(count, count + self.gen_length)
        length = -(-(count + self.gen_length) // self.size) * self.size
        self.tokens = torch.cat([self.prompt, torch.full((length - count,), self.arch.mask_token_id)])
        self.masked = torch.arange(length) >= count
        padded = -(-count // self.size) * self.size  # the prefill has the prompt and masks up to a whole block
        self.enter(padded - self.size)
        for start in range(0, padded, self.size):
            logits = self.logits_of([*range(start, start + self.size)], start + self.size, evicts=False)
        if padded > count:
            self.denoised([*logits], logits)
        elif self.arch.shifted:
            self.first_of(padded, logits)
        while self.masked[wanted].any():
            if self.masked[self.start : self.start + self.size].any():
                self.step()
            else:
                self.next_block()
        return self.tokens[wanted]

    def enter(self, start: int) -> None:
        """The scheduler's facts about a new block."""
        self.start, self.of_block = start, list[int]()
        self.uncached, self.progress, self.decoded_sum, self.decoding_steps = [True] * self.size, -1, 0, 0

    def denoised(self, computed: list[int], logits: dict[int, Tensor]) -> int:
        decided = self.decide(logits)
        self.steps.append(StatedStep(computed, sorted(logits), decided))
        self.of_block.append(len(decided))  # of all steps, by which the schedule goes
        return len(decided)

    def left(self) -> list[int]:
        """Offsets of the tokens that are computed."""
        return [offset for offset in range(self.size) if self.uncached[offset] or not self.cache]

    def step(self) -> None:
        """A denoising step behind the prefill."""
        computed = [self.start + offset for offset in self.left()]
        before = [not flag for flag in self.masked[self.start : self.start + self.size].tolist()]
        logits = self.logits_of(computed, computed[-1] + 1, evicts=True)
        for offset, known in enumerate(before):  # by the mask before the step, so that tokens are computed once more
            beside = self.cache == "dc" or offset + 1 == self.size or before[offset + 1]
            self.uncached[offset] &= not (known and beside)
        if count := self.denoised(computed, logits):
            self.decoded_sum, self.decoding_steps = self.decoded_sum + count, self.decoding_steps + 1

    def next_block(self) -> None:
        """One pass more over a finished block, or over what is not cached of it."""
        if self.start + self.size > len(self.prompt):
            offsets = self.left() if self.commit == "cached" else [*range(self.size)]
            places = [self.start + offset for offset in offsets]
            logits = self.logits_of(places, places[-1] + 1, evicts=False)
            if self.arch.shifted:
                self.first_of(self.start + self.size, logits)
        self.enter(self.start + self.size)

    def logits_of(self, places: list[int], end: int, *, evicts: bool) -> dict[int, Tensor]:
        """Logits of the rows that are kept, by position; keys up to `end` are seen, behind the eviction up to the last row kept."""
        arch, scores = self.arch, list[dict[int, float]]()
        x = self.weight("embedding")[self.tokens[places]]
        for layer in range(arch.layers):
            q, k, v = self.queries_keys_values(x, layer, places)
            self.keys |= {(layer, place): (k[row], v[row]) for row, place in enumerate(places)}
            if evicts and layer < 2:
                scores.append(self.among_masks(places, q, k))
            if evicts and layer == 1:
                kept = self.retained(places, {place: scores[1][place] - scores[0][place] for place in scores[0]})
                self.progress = max(self.progress, kept[-1] - self.start)
                rows, end = [places.index(place) for place in kept], kept[-1] + 1
                places, x, q = kept, x[rows], q[rows]
            keys, values = (torch.stack([self.keys[layer, place][part] for place in range(end)]) for part in (0, 1))
            group = arch.attention.heads // arch.attention.kv_heads
            weights = torch.einsum("tnh,snh->nts", q, keys.repeat_interleave(group, 1)) * arch.attention.head_size**-0.5
            y = torch.einsum("nts,snh->tnh", weights.softmax(-1), values.repeat_interleave(group, 1)).flatten(1)
            x = self.fed_on(x, y, layer)
        return dict(zip(places, self.logits(x), strict=True))

    def among_masks(self, places: list[int], q: Tensor, k: Tensor) -> dict[int, float]:
        """The attention of masked tokens to each other: the largest of three adjacent scores, its softmax, summed."""
        open_ = [row for row, place in enumerate(places) if self.masked[place]]
        keys = k[open_].repeat_interleave(self.arch.attention.heads // self.arch.attention.kv_heads, 1)
        found = torch.einsum("anh,bnh->nab", q[open_], keys) * self.arch.attention.head_size**-0.5
        beyond = torch.full((*found.shape[:2], 1), -math.inf, dtype=found.dtype)
        left, right = torch.cat([beyond, found[..., :-1]], -1), torch.cat([found[..., 1:], beyond], -1)
        total = found.maximum(left).maximum(right).softmax(-1).sum((0, 1))
        return {places[row]: float(value) for row, value in zip(open_, total, strict=True)}

    def retained(self, places: list[int], delta: dict[int, float]) -> list[int]:
        assert self.eviction is not None
        open_ = sorted(delta)
        average = Fraction(self.decoded_sum, self.decoding_steps) if self.decoding_steps else Fraction(1)
        target = min(len(open_), math.ceil(max(average, Fraction(1)) * Fraction(str(self.eviction.alpha))))
        if len(open_) <= target:
            return places
        mean = sum(delta.values()) / len(delta)
        spread = math.sqrt(sum((value - mean) ** 2 for value in delta.values()) / len(delta))
        above = {place for place in open_ if delta[place] >= mean + spread}
        best = above if len(above) >= target else {*sorted(open_, key=lambda place: (-delta[place], place))[:target]}
        best = best | {place for place in open_ if place + 1 in best}
        last = max(best)
        best |= {place for place in open_ if place < last and place - self.start > self.progress}
        return [place for place in places if place not in delta or place in best]


@dataclass
class PublishedExperts(Published, Experts):
    """The same of LLaDA2.0, whose experts the paper's statement has."""
