"""Samples of rows of logits by the Gumbel-max rule, kept online over tiles: shared by row_sample and unembed_sample.

sample = argmax_v(logits_v - temperature * log(E_v)), ties to the lower index, E_v independent exponential numbers: a
draw from softmax(logits / temperature), and the argmax at temperature 0. It is small E that give the large noise g =
-log E, and float32 is fine there: the tail reaches 26.3. -log(-log u) in float32 ends at 16.6, which sharpens what a
diffusion model draws (Zheng et al., arXiv 2409.02908).

E depends on the row's key and on the column alone, and is made so that few of its numbers need to be known. Columns
come in groups of 32, whose smallest numbers come first, from one call: the smallest of 32 exponential numbers is
exponential / 32, and lies anywhere; what the others exceed it by is exponential again. So with exponentials e, f (and
h_v for each column), E = e / 32 in a place, e / 32 + f / 31 in another and e / 32 + f / 31 + h_v in the other 30. Where
a group's largest logit with the second smallest number cannot win, and that is nearly everywhere, nothing else of it is
computed on a GPU. The groups are such that there one thread has a group's columns: group 4 * (v // 128) + v % 32 // 8
has column v, in place 8 * (v // 32 % 4) + v % 8.

Random words are those of Philox 4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3": the fewest rounds
with a margin that pass BigCrush) under the key: e, f and the places from words 0, 1 and 2 of counter (group, 1, 0, 0);
h_v from word v // 32 % 4 of counter (32 * (v // 128) + v % 32, 0, 0, 0). An exponential number is -log(1 - u), u =
(word + 1/2) / 2^32. Of the word t for places, the first is t % 32, and the other follows at 1 + (t // 32 * 31) // 2^27,
modulo 32.

Two numbers belong to a row and not to its columns: u of word 0 of counter (0, 2, 0, 0), by which rows are chosen in random
order, and the Gumbel number -log(-log(1 - u)) of word 0 of counter (0, 3, 0, 0), which perturbs a row's score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from mosaic.kernels.shared.scratch import beginning
from mosaic.registrar.tiles import COUNTER_COLUMNS, COUNTERS, GROUP_RUN, ROW_NUMBERS, SAMPLE_TILES

_ROUNDS: Final = 7
_GROUPS: Final = COUNTERS // GROUP_RUN
"""Groups in a block of `COUNTER_COLUMNS` columns."""
_RUNS: Final = COUNTER_COLUMNS // COUNTERS
_MEMBERS: Final = _RUNS * GROUP_RUN
_INTEGERS: Final = (0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85, 0xFFFFFFFF, 32, _MEMBERS - 1, 5, 27, 1)
"""Two multipliers, two key increments, a word's mask and bits, then what makes two places of a word: in scratch, as
PyTorch would allocate a plain number."""
_FLOATS: Final = (0.5, 2.0**-32, 1.0 - 2.0**-24, 1 / _MEMBERS, 1 / (_MEMBERS - 1))
"""u = (word + 1/2) / 2^32, at most the largest number below 1: words near 2^32 round up to it."""
_UNIFORM_DOMAIN: Final = 2
_GUMBEL_DOMAIN: Final = 3
"""Second words of the counters that give a row's own numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSamples:
    """The two outputs [C] of some rows, their keys, temperatures and best scores [C], and the scratch tiles to update them."""

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
        columns = ("keys", "temperature", "sample", "sample_logit", "score")
        return replace(self, **{name: getattr(self, name)[start:end] for name in columns})

    @property
    def drawn(self) -> bool:
        """Whether a row has any noise; without, its sample is the argmax."""
        return bool(self.temperature.numpy().any())

    def update(self, logits_CV: Tensor, first_column: int) -> None:
        """Take in a tile of logits, float32, the columns from `first_column` on; tiles come in ascending order."""
        if not self.drawn:
            return
        rows, columns = logits_CV.shape
        top, logit, index, better = (tile[:rows] for tile in self.tiles[:4])
        base, scores, *scratch = self.tiles[4:]
        blocks = -(-columns // COUNTER_COLUMNS)
        score_CV = beginning(scores, (rows, blocks * COUNTER_COLUMNS))
        fill_exponentials(score_CV, self.keys, first_column, scratch)
        score_CV.log_().neg_()
        score_CV = score_CV[:, :columns]
        score_CV.mul_(self.temperature.unsqueeze(1)).add_(logits_CV)
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
        """Take the argmax of rows without noise."""
        noisy = self.tiles[3]
        for start in range(0, token.shape[0], noisy.shape[0]):
            mine = slice(start, start + noisy.shape[0])
            heat, sample, logit = self.temperature[mine], self.sample[mine], self.sample_logit[mine]
            drawn = noisy[: heat.shape[0]].copy_(heat)
            torch.where(drawn, sample, token[mine], out=sample)
            torch.where(drawn, logit, maximum[mine], out=logit)


def random_numbers(keys: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the numbers under some keys [C] for this many columns: what `exponentials` are made of.

    Returns
    -------
    tuple of Tensor
        u of every column by groups, float32 [C, groups, 32]; u of the smallest, u of the next, float32 [C, groups];
        their places, int64 [C, groups].

    Examples
    --------
    >>> random_numbers(torch.tensor([7]), 2)[0].shape
    torch.Size([1, 4, 32])
    """
    blocks = -(-columns // COUNTER_COLUMNS)
    own, first, second, place, next_place = _fill_numbers(keys, 0, blocks, _scratch(keys.shape[0], blocks))
    return own.reshape(keys.shape[0], blocks * _GROUPS, _MEMBERS), first, second, place, next_place


def exponentials(keys: Tensor, columns: int) -> Tensor:
    """Return E under some keys [C], float32 [C, columns].

    >>> exponentials(torch.tensor([7]), 2).shape
    torch.Size([1, 2])
    """
    rows, blocks = keys.shape[0], -(-columns // COUNTER_COLUMNS)
    made = torch.empty(rows, blocks * COUNTER_COLUMNS)
    fill_exponentials(made, keys, 0, _scratch(rows, blocks))
    return made[:, :columns]


def uniforms(keys: Tensor) -> Tensor:
    """Return u in (0, 1) of each key, float32 [C]: the random order of rows.

    >>> uniforms(torch.tensor([7, 8])).shape
    torch.Size([2])
    """
    made = torch.empty(keys.shape[0])
    fill_uniforms(made, keys, _scratch_of_rows())
    return made


def gumbels(keys: Tensor) -> Tensor:
    """Return the Gumbel number of each key, float32 [C]: what perturbs the scores of rows.

    >>> gumbels(torch.tensor([7, 8])).shape
    torch.Size([2])
    """
    made = torch.empty(keys.shape[0])
    fill_gumbels(made, keys, _scratch_of_rows())
    return made


def fill_uniforms(made_C: Tensor, keys: Tensor, scratch: Sequence[Tensor], domain: int = _UNIFORM_DOMAIN) -> None:
    """Fill u [C] of the keys; scratch: ten integers, five floats and eight int64 tiles of some rows at a time."""
    integers, floats, low, high, *words = scratch
    _fill_constants(integers, floats)
    step = low.shape[0]
    for start in range(0, keys.shape[0], step):
        word, *_ = _words(keys[start : start + step], (0, 1), domain, (low, high), integers, words)
        _to_uniforms(made_C[start : start + step].copy_(word.squeeze(1)), floats)


def fill_gumbels(made_C: Tensor, keys: Tensor, scratch: Sequence[Tensor]) -> None:
    """Fill the Gumbel numbers [C] of the keys; scratch as for `fill_uniforms`."""
    fill_uniforms(made_C, keys, scratch, _GUMBEL_DOMAIN)
    made_C.neg_().log1p_().neg_().log_().neg_()


def _scratch_of_rows() -> list[Tensor]:
    return [torch.empty(tile.shape, dtype=getattr(torch, tile.dtype)) for tile in ROW_NUMBERS]


def _scratch(rows: int, blocks: int) -> list[Tensor]:
    constants = [torch.empty(len(_INTEGERS), dtype=torch.int64), torch.empty(len(_FLOATS))]
    key, words = torch.empty(2, rows, dtype=torch.int64), torch.empty(6, rows * blocks * COUNTERS, dtype=torch.int64)
    groups = torch.empty(2, rows * blocks * _GROUPS)
    return [*constants, *key, *groups, torch.empty(rows * blocks * COUNTER_COLUMNS), *words]


def fill_exponentials(made_CV: Tensor, keys: Tensor, first_column: int, scratch: Sequence[Tensor]) -> None:
    """Fill E [C, n*128] of the columns from `first_column` on, a multiple of 128; scratch as for `_fill_numbers`."""
    rows, blocks = made_CV.shape[0], made_CV.shape[1] // COUNTER_COLUMNS
    own, first, second, place, next_place = _fill_numbers(keys, first_column, blocks, scratch)
    for numbers in (own, first, second):
        numbers.neg_().log1p_().neg_()
    part, next_part = scratch[1][3:].unsqueeze(1)
    first.mul_(part)
    second.mul_(next_part).add_(first)
    members = own.view(rows, blocks * _GROUPS, _MEMBERS)
    members.add_(second.unsqueeze(2))
    members.scatter_(2, next_place.unsqueeze(2), second.unsqueeze(2))
    members.scatter_(2, place.unsqueeze(2), first.unsqueeze(2))
    made_CV.view(rows, blocks, _RUNS, _GROUPS, GROUP_RUN).copy_(own.transpose(2, 3))


def _fill_numbers(
    keys: Tensor, first_column: int, blocks: int, scratch: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Make the random numbers of n blocks of 128 columns from `first_column` on, a multiple of 128.

    Parameters
    ----------
    keys
        int64 [C].
    scratch
        Ten integers, five floats, two int64 of C elements or more, float32 of C*n*4 twice and of C*n*128, and six int64
        of C*n*32 or more; all written.

    Returns
    -------
    tuple of Tensor
        u by groups, float32 [C, n, 4, 4, 8] (group, run, column of the run), then as `random_numbers`; in scratch.
    """
    integers, floats, low, high, *group_numbers, numbers = scratch[:7]
    _fill_constants(integers, floats)
    rows, block = keys.shape[0], first_column // COUNTER_COLUMNS
    own = beginning(numbers, (rows, blocks, _GROUPS, _RUNS, GROUP_RUN))
    drawn = _words(keys, (block * COUNTERS, blocks * COUNTERS), 0, (low, high), integers, scratch[7:])
    for run, word in enumerate(drawn):
        own[:, :, :, run].copy_(word.view(rows, blocks, _GROUPS, GROUP_RUN))
    first, second = (beginning(tile, (rows, blocks * _GROUPS)) for tile in group_numbers)
    drawn = _words(keys, (block * _GROUPS, blocks * _GROUPS), 1, (low, high), integers, scratch[7:])
    zero, one, two, _ = drawn
    first.copy_(zero)
    second.copy_(one)
    for words in (own, first, second):
        _to_uniforms(words, floats)
    last, place_bits, rest_bits, least = integers[6:].unsqueeze(1)
    torch.bitwise_and(two, last, out=zero)
    two.bitwise_right_shift_(place_bits).mul_(last).bitwise_right_shift_(rest_bits)
    two.add_(least).add_(zero).bitwise_and_(last)
    return own, first, second, zero, two


def _fill_constants(integers: Tensor, floats: Tensor) -> None:
    for place, number in enumerate(_INTEGERS):
        integers[place].fill_(number)
    for place, value in enumerate(_FLOATS):
        floats[place].fill_(value)


def _to_uniforms(words: Tensor, floats: Tensor) -> None:
    """Turn words, as float32, into u in (0, 1) in place."""
    half, scale, largest = floats[:3].unsqueeze(1)
    words.add_(half).mul_(scale)
    torch.minimum(words, largest, out=words)


def _words(
    keys: Tensor,
    counted: tuple[int, int],
    domain: int,
    halves: tuple[Tensor, Tensor],
    integers: Tensor,
    tiles: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Give four words [C, count] for the counters (first + i, domain, 0, 0), `counted` being first and count."""
    rows, (first, count) = keys.shape[0], counted
    counters = [beginning(tile, (rows, count)) for tile in tiles]
    low, high = (half[:rows].unsqueeze(1) for half in halves)
    mask, bits = integers[4:6].unsqueeze(1)
    torch.bitwise_and(keys.unsqueeze(1), mask, out=low)
    torch.bitwise_right_shift(keys.unsqueeze(1), bits, out=high).bitwise_and_(mask)
    torch.arange(first, first + count, out=counters[0][0])
    counters[0][1:].copy_(counters[0][:1].expand(rows - 1, -1))
    counters[1].fill_(domain)
    for counter in counters[2:4]:
        counter.zero_()
    return philox(counters, (low, high), integers)


def philox(words: Sequence[Tensor], key: tuple[Tensor, Tensor], integers: Tensor) -> tuple[Tensor, ...]:
    """Turn counters into random words, in place: four words and two spare tensors, the key's two words; all written."""
    multiply_0, multiply_1, raise_0, raise_1, mask, bits = integers[:6].unsqueeze(1)
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
