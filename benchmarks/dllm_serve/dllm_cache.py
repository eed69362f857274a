"""dLLM-Cache: keys, values and the outputs of attention and feed-forward are kept for all rows, and few of them computed anew.

Rows of the prompt are computed every `prompt` steps, those of the answer every `answer` steps; in between, the values of all rows
of the answer are, and where they differ most from the kept ones, the rest (maomaocun/dLLM-cache). The batch is padded as published,
with the logits of all rows; or packed, with those of the block alone. Kept keys are rotated, and renewed in place: the published
hooks rotate all of them in each step and copy prompt and answer together. Legend as in `forward`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.bench.baselines import Transformer
from benchmarks.dllm_serve.forward import (
    Angles,
    Bounds,
    attend_packed,
    attend_padded,
    commit,
    decided,
    queries_and_keys,
    values,
)
from benchmarks.dllm_serve.padded import Padded
from benchmarks.dllm_serve.phases import MOST_LOGITS
from benchmarks.dllm_serve.trace import BLOCK, Asked

__all__ = ["PAPER", "Intervals", "dllm_cache", "dllm_cache_packed"]


@dataclass(frozen=True, slots=True)
class Intervals:
    """Steps between refreshes of prompts and of answers, and the share of an answer's rows that other steps compute."""

    prompt: int = 100
    answer: int = 7
    share: float = 0.25


PAPER: Final = Intervals()
"""dLLM-Serve's table 3, and dLLM-Cache's own share."""


class _Features:
    """What is kept of packed rows, requests one after the other, prompt before answer.

    Parameters
    ----------
    sizes
        Tokens of each request's prompt and answer, padding included.
    seen
        Of a padded batch, whose requests are alike: the keys that are seen, bool [B, 1, 1, P]; None: all of a request's.
    """

    def __init__(
        self, network: Transformer, sizes: Sequence[tuple[int, int]], intervals: Intervals, *, padded: bool,
        seen: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.network, self.intervals, self.padded, self.seen = network, intervals, padded, seen
        own, layers = network.arch.attention, range(network.arch.layers)
        rows = sum(prompt + answer for prompt, answer in sizes)
        made = {"dtype": network.dtype, "device": network.embedding.device}
        self.k, self.v = ([torch.zeros(rows, own.kv_heads, own.head_size, **made) for _ in layers] for _ in "kv")
        self.attended, self.fed = ([torch.zeros(rows, network.arch.hidden, **made) for _ in layers] for _ in "af")
        self.resize(sizes)

    def resize(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Leave the requests behind the first ones out."""
        self.sizes = list(sizes)
        starts = [*accumulate((prompt + answer for prompt, answer in sizes), initial=0)]
        prompts = [start + np.arange(prompt) for start, (prompt, _) in zip(starts, sizes, strict=False)]
        answers = [start + prompt + np.arange(answer) for start, (prompt, answer) in zip(starts, sizes, strict=False)]
        self.counts = [int(answer * self.intervals.share) for _, answer in sizes]
        most_answer, most = max(answer for _, answer in sizes), max(self.counts)
        laid, place = np.full((len(sizes), most_answer), -1), 0
        for number, (_, answer) in enumerate(sizes):
            laid[number, :answer] = place + np.arange(answer)
            place += answer
        self.rows = starts[-1]
        for name, parts in (("k", self.k), ("v", self.v), ("attended", self.attended), ("fed", self.fed)):
            setattr(self, name, [part[: self.rows] for part in parts])
        self.answer_rows, self.prompt_rows = map(self._on_device, (np.concatenate(answers), np.concatenate(prompts)))
        self.laid = self._on_device(laid)
        self.ranks = self._on_device(np.flatnonzero(np.arange(most) < np.array(self.counts)[:, None]))
        self.most = most
        # prompts' rows and chosen ones, each side by side, in the order of requests
        ends = [*accumulate(self.counts, initial=sum(map(len, prompts)))]
        firsts = [*accumulate(map(len, prompts), initial=0)]
        order = [
            np.r_[firsts[number] : firsts[number + 1], ends[number] : ends[number + 1]] for number in range(len(sizes))
        ]
        self.merged = self._on_device(np.concatenate(order))
        self._bounds = dict[tuple[bool, bool], Bounds]()

    def _on_device(self, found: np.ndarray) -> Tensor:
        return torch.from_numpy(found.astype(np.int64)).to(self.network.embedding.device)

    def forward(self, ids: Tensor, angles: tuple[Tensor, Tensor], step: int) -> Tensor:
        """Return hidden states [T, D] of all rows, of which those are computed that are due."""
        due = step % self.intervals.prompt == 0, step % self.intervals.answer == 0
        x = F.embedding(ids, self.network.embedding)
        for number, layer in enumerate(self.network.layers):
            rows = self._attend(number, layer, x, angles, due)
            x = x + self.attended[number]
            self.fed[number][rows] = layer.ffn(layer.ffn_norm(x[rows]))
            x = x + self.fed[number]
        return x

    def _attend(
        self, number: int, layer: torch.nn.Module, x: Tensor, angles: tuple[Tensor, Tensor], due: tuple[bool, bool]
    ) -> Tensor:
        """Renew what attention keeps of a layer; return the rows that are computed."""
        rows = self._renew_values(self.v[number], layer, x, due)
        q, k = queries_and_keys(layer.attention, layer.attention_norm(x[rows]), tuple(part[rows] for part in angles))
        self.k[number][rows] = k
        y = self._attended(q, self.k[number], self.v[number], due)
        self.attended[number][rows] = layer.attention.o(y.flatten(-2))
        return rows

    def _renew_values(self, kept: Tensor, layer: torch.nn.Module, x: Tensor, due: tuple[bool, bool]) -> Tensor:
        """Write the values that are due, of the answers always; return the rows that are computed."""
        prompts, answers = due
        found = values(layer.attention, layer.attention_norm(x[self.answer_rows]))
        rows = self.answer_rows if answers else self._changed(found, kept[self.answer_rows])
        kept[self.answer_rows] = found
        if prompts:
            kept[self.prompt_rows] = values(layer.attention, layer.attention_norm(x[self.prompt_rows]))
            rows = (
                torch.arange(self.rows, device=x.device)
                if answers
                else torch.cat([self.prompt_rows, rows])[self.merged]
            )
        return rows

    def _changed(self, new: Tensor, old: Tensor) -> Tensor:
        """Return the rows of answers whose values [answer rows, K, H] are least alike, of equal ones the first.

        In bfloat16, the model's dtype as published, rows that have not changed are equal; in a finer one noise would choose.
        """
        alike = F.cosine_similarity(new.flatten(-2), old.flatten(-2), dim=-1).bfloat16()
        alike = alike[self.laid.clamp(min=0)].masked_fill(self.laid < 0, float("inf"))
        order = alike.sort(dim=-1, stable=True).indices[:, : self.most]
        return self.answer_rows[self.laid.gather(1, order).flatten()[self.ranks]]

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, due: tuple[bool, bool]) -> Tensor:
        if self.padded:
            q, k, v = (part.unflatten(0, (len(self.sizes), -1)) for part in (q, k, v))
            return attend_padded(q, k, v, self.seen).flatten(0, 1)
        if due not in self._bounds:
            queries = [
                prompt * due[0] + (answer if due[1] else count)
                for (prompt, answer), count in zip(self.sizes, self.counts, strict=True)
            ]
            self._bounds[due] = Bounds.of(queries, [sum(size) for size in self.sizes], q.device)
        return attend_packed(q, k, v, self._bounds[due])


def dllm_cache(network: Transformer, batch: Padded, intervals: Intervals = PAPER) -> Iterator[None]:
    """Decode a padded batch; yield after every step."""
    count, length = batch.ids.shape
    features = _Features(
        network, [(batch.first, length - batch.first)] * count, intervals, padded=True, seen=batch.seen
    )
    angles = tuple(part.repeat(count, 1, 1) for part in batch.angles)
    for number, block in enumerate(batch.blocks()):
        for step in range(BLOCK):
            hidden = features.forward(batch.ids.flatten(), angles, number * BLOCK + step).unflatten(0, (count, length))
            token, confidence = decided(network, hidden, network.dtype)
            commit(batch.ids[:, block], batch.open_[:, block], token[:, block], confidence[:, block])
            yield


def dllm_cache_packed(
    network: Transformer, found: Sequence[tuple[Asked, Tensor]], intervals: Intervals = PAPER
) -> Iterator[list[tuple[Asked, Tensor]]]:
    """Decode packed requests and prompts; yield who has ended after every step, and their answers."""
    device, table = network.embedding.device, Angles.of(network, max(asked.length for asked, _ in found))
    left = sorted(found, key=lambda one: -one[0].answer)
    sizes = [(asked.prompt, asked.answer) for asked, _ in left]
    features = _Features(network, sizes, intervals, padded=False)
    masks = [torch.full((asked.answer,), network.arch.mask_token_id) for asked, _ in left]
    ids = torch.cat([part for (_, prompt), mask in zip(left, masks, strict=True) for part in (prompt, mask)]).to(device)
    positions = torch.cat([torch.arange(asked.length) for asked, _ in left]).to(device)
    open_ = torch.cat([torch.arange(asked.length) >= asked.prompt for asked, _ in left]).to(device)
    first = torch.tensor([*accumulate((asked.length for asked, _ in left), initial=0)][:-1])
    begin = (first + torch.tensor([asked.prompt for asked, _ in left])).to(device)
    for step in range(sizes[0][1]):
        rows = features.rows
        hidden = features.forward(ids[:rows], table.at(positions[:rows]), step)
        block = begin[: len(left), None] + step // BLOCK * BLOCK + torch.arange(BLOCK, device=device)
        token, confidence = decided(network, hidden[block.flatten()], torch.float32, MOST_LOGITS)
        block_ids, block_open = ids[block], open_[block]
        commit(block_ids, block_open, token.view(-1, BLOCK), confidence.view(-1, BLOCK))
        ids[block], open_[block] = block_ids, block_open
        keep = sum(asked.answer > step + 1 for asked, _ in left)
        ended = []
        for number, (asked, _) in enumerate(left[keep:], start=keep):
            start = int(begin[number])
            ended.append((asked, ids[start : start + asked.answer].clone()))
        if ended and keep:
            features.resize(sizes[:keep])
        left = left[:keep]
        yield ended
