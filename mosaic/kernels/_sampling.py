"""Samples of rows of logits by the Gumbel-max rule, kept online over tiles: shared by row_sample and unembed_sample.

sample = argmax_v(logits_v + temperature * g_v), ties to the lower index: a draw from softmax(logits / temperature), and
the argmax at temperature 0. g = -log(-log(1 - u)), u uniform: it is small u, where float32 is fine, that give the large
g, so the tail reaches 22.9. -log(-log u) in float32 ends at 16.6, which sharpens what a diffusion model draws (Zheng et
al., arXiv 2409.02908). u depends on the row's key and on the column alone: Philox 4x32-10 (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3") under the key gives four words for counter 32 * (v // 128) + v % 32, and column v
takes word v // 32 % 4 of them. Four columns that lie 32 apart share a counter: on a GPU one thread has them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from mosaic.kernels._operands import INDEX, check_shapes
from mosaic.registrar.implementations.cpu import COUNTER_COLUMNS, COUNTERS, SAMPLE_TILES

__all__ = ["RowSamples", "check_samples", "uniforms"]

_ROUNDS: Final = 10
_INTEGERS: Final = (0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85, 0xFFFFFFFF, 32)
"""Two multipliers, two key increments, a word's mask and bits: in scratch, as PyTorch would allocate a plain number."""
_FLOATS: Final = (0.5, 2.0**-32, 1.0 - 2.0**-24)
"""u = (word + 1/2) / 2^32, at most the largest number below 1: words near 2^32 round up to it."""


def check_samples(
    kernel: str, rows: int, keys: Tensor, temperature: Tensor, sample: Tensor, sample_logit: Tensor
) -> None:
    """Check the operands that a sampling kernel has besides those of the statistics."""
    check_shapes(
        kernel,
        keys=(keys, (rows,), INDEX[0]),
        temperature=(temperature, (1,), torch.float32),
        sample=(sample, (rows,), INDEX[0]),
        sample_logit=(sample_logit, (rows,), torch.float32),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSamples:
    """The two outputs [C] of some rows, their keys and best scores [C], and the scratch tiles to update them."""

    keys: Tensor
    temperature: Tensor
    sample: Tensor
    sample_logit: Tensor
    score: Tensor
    tiles: list[Tensor]

    @classmethod
    def over(
        cls, tiles: list[Tensor], *, keys: Tensor, temperature: Tensor, sample: Tensor, sample_logit: Tensor
    ) -> RowSamples:
        """Start on the last tiles of a kernel's scratch, those that `SAMPLE_TILES` counts."""
        score, *own = tiles[-SAMPLE_TILES:]
        return cls(keys=keys, temperature=temperature, sample=sample, sample_logit=sample_logit, score=score, tiles=own)

    def rows(self, start: int, end: int) -> RowSamples:
        """View the rows [start, end)."""
        mine = slice(start, end)
        return RowSamples(
            keys=self.keys[mine],
            temperature=self.temperature,
            sample=self.sample[mine],
            sample_logit=self.sample_logit[mine],
            score=self.score[mine],
            tiles=self.tiles,
        )

    @property
    def drawn(self) -> bool:
        """Whether there is any noise; without, the sample is the argmax."""
        return float(self.temperature) > 0.0

    def update(self, logits_CV: Tensor, first_column: int) -> None:
        """Take in a tile of logits, float32, the columns from `first_column` on; tiles come in ascending order."""
        if not self.drawn:
            return
        rows, columns = logits_CV.shape
        top, logit, index, better = (tile[:rows] for tile in self.tiles[:4])
        base, u, *words = self.tiles[4:]
        groups = -(-columns // COUNTER_COLUMNS)
        score_CV = u.view(-1)[: rows * groups * COUNTER_COLUMNS].view(rows, groups * COUNTER_COLUMNS)
        _fill_uniforms(score_CV, self.keys, first_column, words)
        score_CV.neg_().log1p_().neg_().log_().neg_()
        score_CV = score_CV[:, :columns]
        score_CV.mul_(self.temperature).add_(logits_CV)
        torch.max(score_CV, dim=1, out=(top, index))
        torch.gather(logits_CV, 1, index.unsqueeze(1), out=logit.unsqueeze(1))
        index.add_(base.fill_(first_column))
        if first_column == 0:
            self.score.copy_(top)
            self.sample.copy_(index)
            self.sample_logit.copy_(logit)
            return
        torch.gt(top, self.score, out=better)  # strictly: a tie keeps the earlier column
        torch.where(better, index, self.sample, out=self.sample)
        torch.where(better, logit, self.sample_logit, out=self.sample_logit)
        torch.maximum(top, self.score, out=self.score)

    def finish(self, token: Tensor, maximum: Tensor) -> None:
        """Without noise, take the argmax."""
        if not self.drawn:
            self.sample.copy_(token)
            self.sample_logit.copy_(maximum)


def uniforms(keys: Tensor, columns: int) -> Tensor:
    """Return the numbers of some keys [C] as float32 [C, columns].

    >>> uniforms(torch.tensor([7]), 2).shape
    torch.Size([1, 2])
    """
    rows, groups = keys.shape[0], -(-columns // COUNTER_COLUMNS)
    u_CV = torch.empty(rows, groups * COUNTER_COLUMNS)
    integers = torch.empty(len(_INTEGERS), dtype=torch.int64)
    key, words = torch.empty(2, rows, dtype=torch.int64), torch.empty(6, rows * groups * COUNTERS, dtype=torch.int64)
    _fill_uniforms(u_CV, keys, 0, [integers, torch.empty(len(_FLOATS)), *key, *words])
    return u_CV[:, :columns]


def _fill_uniforms(u_CV: Tensor, keys: Tensor, first_column: int, scratch: Sequence[Tensor]) -> None:
    """Fill u [C, n*128] with the numbers of the columns from `first_column` on, a multiple of 128.

    Parameters
    ----------
    keys
        int64 [C].
    scratch
        Six integers, three floats, two int64 of C elements or more and six of C*n*32 or more; all written.
    """
    integers, floats, low, high, *words = scratch
    for place, number in enumerate(_INTEGERS):
        integers[place].fill_(number)
    for place, value in enumerate(_FLOATS):
        floats[place].fill_(value)
    rows, groups = u_CV.shape[0], u_CV.shape[1] // COUNTER_COLUMNS
    counters = [word.view(-1)[: rows * groups * COUNTERS].view(rows, groups * COUNTERS) for word in words]
    halves = low[:rows].unsqueeze(1), high[:rows].unsqueeze(1)
    mask, bits = integers[4:].unsqueeze(1)
    torch.bitwise_and(keys.unsqueeze(1), mask, out=halves[0])
    torch.bitwise_right_shift(keys.unsqueeze(1), bits, out=halves[1]).bitwise_and_(mask)
    first = first_column // COUNTER_COLUMNS * COUNTERS
    torch.arange(first, first + groups * COUNTERS, out=counters[0][0])
    counters[0][1:].copy_(counters[0][:1].expand(rows - 1, -1))
    for word in counters[1:4]:
        word.zero_()
    u = u_CV.view(rows, groups, COUNTER_COLUMNS // COUNTERS, COUNTERS)
    for place, word in enumerate(_philox(counters, halves, integers)):
        u[:, :, place].copy_(word.view(rows, groups, COUNTERS))
    half, scale, largest = floats.unsqueeze(1)
    u_CV.add_(half).mul_(scale)
    torch.minimum(u_CV, largest, out=u_CV)


def _philox(words: Sequence[Tensor], key: tuple[Tensor, Tensor], integers: Tensor) -> tuple[Tensor, ...]:
    """Turn counters into random words, in place: four words and two spare tensors, the key's two words; all written."""
    multiply_0, multiply_1, raise_0, raise_1, mask, bits = integers.unsqueeze(1)
    zero, one, two, three, product_0, product_1 = words
    for _ in range(_ROUNDS):
        torch.mul(zero, multiply_0, out=product_0)  # 64 bits, the uppermost taken for a sign: hence the masks
        torch.mul(two, multiply_1, out=product_1)
        torch.bitwise_right_shift(product_1, bits, out=zero).bitwise_and_(mask)
        zero.bitwise_xor_(one).bitwise_xor_(key[0])
        torch.bitwise_right_shift(product_0, bits, out=two).bitwise_and_(mask)
        two.bitwise_xor_(three).bitwise_xor_(key[1])
        one, three, product_0, product_1 = product_1.bitwise_and_(mask), product_0.bitwise_and_(mask), one, three
        key[0].add_(raise_0).bitwise_and_(mask)
        key[1].add_(raise_1).bitwise_and_(mask)
    return zero, one, two, three
