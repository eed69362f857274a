"""A kernel that stores the random words and the noise of the first 1,024 columns, for tests of the sampling kernels."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mosaic.kernels.cuda._sampling import gumbel, random_words


@triton.jit
def words_kernel(keys, words, noise, COUNTERS: tl.constexpr):
    program = tl.program_id(0)
    counter = tl.arange(0, COUNTERS)
    place = program * 4 * COUNTERS + counter // 32 * 128 + counter % 32
    zero, one, two, three = random_words(counter.to(tl.uint32), tl.load(keys + program))
    tl.store(words + place, zero.to(tl.int32, bitcast=True))
    tl.store(words + place + 32, one.to(tl.int32, bitcast=True))
    tl.store(words + place + 64, two.to(tl.int32, bitcast=True))
    tl.store(words + place + 96, three.to(tl.int32, bitcast=True))
    tl.store(noise + place, gumbel(zero))
    tl.store(noise + place + 32, gumbel(one))
    tl.store(noise + place + 64, gumbel(two))
    tl.store(noise + place + 96, gumbel(three))


def launch(keys: Tensor, words: Tensor, noise: Tensor) -> None:
    """Fill words [K, 1024] int32 and noise [K, 1024] float32 for keys [K]."""
    words_kernel[(keys.shape[0],)](keys, words, noise, COUNTERS=256)
