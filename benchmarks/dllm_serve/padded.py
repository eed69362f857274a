"""Static loops as published: a batch is padded on the left to one length, has one answer length, and all of it ends together.

Each is a generator that yields after every step. Attention is PyTorch's with a mask; a step computes the logits of all rows that it
forwards. Legend: B requests, L positions, as in `forward`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.bench.baselines import Transformer
from benchmarks.dllm_serve.forward import Angles, Attend, attend_padded, commit, decided, run_layers
from benchmarks.dllm_serve.selection import DELAY, OPTIONS, chosen, scores_of
from benchmarks.dllm_serve.trace import BLOCK

__all__ = ["Padded", "fast_dllm", "plain", "sparse_dllm"]


@dataclass(slots=True)
class Padded:
    """A batch: ids int64 [B, L], where answers are to be decided bool [B, L], and which keys are seen, None where all are.

    Parameters
    ----------
    first
        Where the answers begin.
    lengths
        Positions of each request without its padding.
    """

    ids: Tensor
    open_: Tensor
    seen: Tensor | None
    first: int
    lengths: list[int]
    angles: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, network: Transformer, prompts: Sequence[Tensor], answer: int) -> Padded:
        """Pad prompts int64 [P]."""
        device, first = network.embedding.device, max(map(len, prompts))
        length = first + answer
        ids = torch.full((len(prompts), length), network.arch.mask_token_id)
        seen = torch.ones(len(prompts), length, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            ids[row, first - len(prompt) : first] = prompt
            seen[row, : first - len(prompt)] = False
        open_ = (torch.arange(length) >= first).expand(len(prompts), -1).clone()
        positions = torch.arange(length, device=device)
        return cls(
            ids.to(device), open_.to(device), None if bool(seen.all()) else seen.to(device)[:, None, None], first,
            [len(prompt) + answer for prompt in prompts], Angles.of(network, length).at(positions),
        )  # fmt: skip

    def answers(self) -> Tensor:
        """Return int64 [B, answer]."""
        return self.ids[:, self.first :]

    def blocks(self) -> Iterator[slice]:
        """Give the blocks of the answers."""
        for start in range(self.first, self.ids.shape[1], BLOCK):
            yield slice(start, start + BLOCK)

    def step(
        self, network: Transformer, block: slice, attend: Attend, *, whole: bool, dtype: torch.dtype | None = None
    ) -> None:
        """Forward all positions or the block's, take the logits of all of them, and decide one token of each request's block.

        `dtype` is the softmax's; None: the model's.
        """
        rows = slice(0, self.ids.shape[1]) if whole else block
        hidden = run_layers(network, self.ids[:, rows], (self.angles[0][rows], self.angles[1][rows]), attend)
        token, confidence = decided(network, hidden, dtype or network.dtype)
        mine = block if whole else slice(None)
        commit(self.ids[:, block], self.open_[:, block], token[:, mine], confidence[:, mine])


def plain(network: Transformer, batch: Padded) -> Iterator[None]:
    """Decode as LLaDA: every step forwards the whole canvas."""
    for block in batch.blocks():
        for _ in range(BLOCK):
            batch.step(network, block, lambda _, q, k, v: attend_padded(q, k, v, batch.seen), whole=True)
            yield


def fast_dllm(network: Transformer, batch: Padded) -> Iterator[None]:
    """Decode as Fast-dLLM with its dual cache: later steps of a block replace its keys among those of the first step."""
    for block in batch.blocks():
        cache: list[tuple[Tensor, Tensor]] = []

        def keep(_: int, q: Tensor, k: Tensor, v: Tensor, cache: list[tuple[Tensor, Tensor]] = cache) -> Tensor:
            cache.append((k, v))
            return attend_padded(q, k, v, batch.seen)

        def replace(
            number: int, q: Tensor, k: Tensor, v: Tensor, block: slice = block,
            cache: list[tuple[Tensor, Tensor]] = cache,
        ) -> Tensor:  # fmt: skip
            for kept, own in zip(cache[number], (k, v), strict=True):
                kept[:, block] = own
            return attend_padded(q, *cache[number], batch.seen)

        for step in range(BLOCK):
            batch.step(network, block, replace if step else keep, whole=not step, dtype=torch.float64)
            yield


def sparse_dllm(network: Transformer, batch: Padded) -> Iterator[None]:
    """Decode as Sparse-dLLM: the second step of a block keeps a share of each layer's keys outside it, for the others."""
    device = batch.ids.device
    counts = torch.tensor([OPTIONS.kept(length - BLOCK) for length in batch.lengths])
    most = int(counts.max())
    ranked = torch.arange(most + BLOCK)
    seen = (ranked < counts[:, None]) | (ranked >= most)
    seen = None if bool(seen.all()) else seen.to(device)[:, None, None]
    for block in batch.blocks():
        kept: list[tuple[Tensor, Tensor]] = []
        outside = torch.ones(batch.ids.shape[1], dtype=torch.bool, device=device)
        outside[block] = False
        candidates = outside.nonzero()[:, 0]

        def first(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend_padded(q, k, v, batch.seen)

        def keep(
            _: int, q: Tensor, k: Tensor, v: Tensor, block: slice = block, candidates: Tensor = candidates,
            kept: list[tuple[Tensor, Tensor]] = kept,
        ) -> Tensor:  # fmt: skip
            scores = scores_of(q[:, block].mean(1, keepdim=True), k)
            if batch.seen is not None:
                scores = scores.masked_fill(~batch.seen[:, 0, 0], float("-inf"))
            rows = candidates[chosen(scores[:, candidates], most)][..., None, None].expand(-1, -1, *k.shape[2:])
            kept.append((k.gather(1, rows), v.gather(1, rows)))
            return attend_padded(q, k, v, batch.seen)

        def reuse(number: int, q: Tensor, k: Tensor, v: Tensor, kept: list[tuple[Tensor, Tensor]] = kept) -> Tensor:
            keys, values = (torch.cat([old, own], dim=1) for old, own in zip(kept[number], (k, v), strict=True))
            return attend_padded(q, keys, values, seen)

        for step in range(BLOCK):
            attend = first if step < DELAY else keep if step == DELAY else reuse
            batch.step(network, block, attend, whole=step <= DELAY)
            yield
