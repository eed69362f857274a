"""A kernel that stores the random numbers of the first 1,024 columns, for tests of the sampling kernels."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mosaic.kernels.cuda.shared.sampling import exponential, group_numbers, random_words


@triton.jit
def words_kernel(keys, words, exponentials, smallest, places, COUNTERS: tl.constexpr):
    program = tl.program_id(0)
    counter = tl.arange(0, COUNTERS)
    place = program * 4 * COUNTERS + counter // 32 * 128 + counter % 32
    zero, one, two, three = random_words(counter.to(tl.uint32), 0, tl.load(keys + program))
    tl.store(words + place, zero.to(tl.int32, bitcast=True))
    tl.store(words + place + 32, one.to(tl.int32, bitcast=True))
    tl.store(words + place + 64, two.to(tl.int32, bitcast=True))
    tl.store(words + place + 96, three.to(tl.int32, bitcast=True))
    tl.store(exponentials + place, exponential(zero))
    tl.store(exponentials + place + 32, exponential(one))
    tl.store(exponentials + place + 64, exponential(two))
    tl.store(exponentials + place + 96, exponential(three))
    group = tl.arange(0, COUNTERS // 8)
    first, second, lowest, next_lowest = group_numbers(group, tl.load(keys + program))
    at = program * (COUNTERS // 4) + group * 2
    tl.store(smallest + at, first)
    tl.store(smallest + at + 1, second)
    tl.store(places + at, lowest)
    tl.store(places + at + 1, next_lowest)


def launch(keys: Tensor, words: Tensor, exponentials: Tensor, smallest: Tensor, places: Tensor) -> None:
    """Fill words [K, 1024] int32, exponentials [K, 1024], smallest [K, 32, 2] and places [K, 32, 2] int32."""
    words_kernel[(keys.shape[0],)](keys, words, exponentials, smallest, places, COUNTERS=256)
