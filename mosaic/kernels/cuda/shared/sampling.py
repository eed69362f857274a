"""The random numbers of `mosaic.kernels.shared.sampling` on CUDA, bit for bit: shared by all kernels that draw."""

import os

from triton.language.extra.cuda import libdevice

from mosaic.kernels.cuda.shared.launching import tl, triton
from mosaic.registrar.tiles import COUNTER_COLUMNS, COUNTERS, GROUP_RUN

STRIDE = tl.constexpr(COUNTERS)
"""Distance of columns that share a counter."""
BLOCK = tl.constexpr(COUNTER_COLUMNS)
"""Columns of which one row of counters serves all."""
RUN = tl.constexpr(GROUP_RUN)
"""Neighbouring columns of a group: four runs, a stride apart."""
GUMBEL_SLACK = tl.constexpr(1e-3)
"""A hundred times the error of `gumbel`, so that a bound made with it holds."""
_LN2 = tl.constexpr(0.6931471805599453)
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def random_words(counter, domain, key):
    """Philox 4x32-7: four words for every uint32 counter, under an int64 key that broadcasts.

    Not tl.philox: its separate upper and lower products are two instructions, and the upper one is slow.
    """
    key_0, key_1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    zero, one, two, three = counter, counter * 0 + domain, counter * 0, counter * 0
    for _ in tl.static_range(7):
        product_0, product_1 = zero.to(tl.uint64) * 0xD2511F53, two.to(tl.uint64) * 0xCD9E8D57
        zero = (product_1 >> 32).to(tl.uint32) ^ one ^ key_0
        two = (product_0 >> 32).to(tl.uint32) ^ three ^ key_1
        one, three = product_1.to(tl.uint32), product_0.to(tl.uint32)
        key_0 += 0x9E3779B9
        key_1 += 0xBB67AE85
    return zero, one, two, three


@triton.jit
def _log2(x):
    # one instruction, where tl.log2 is twenty; the interpreter has no device library
    return tl.log2(x) if _INTERPRETED else libdevice.fast_log2f(x)


@triton.jit
def uniform(word):
    """u = (word + 1/2) / 2^32, at most the largest number below 1."""
    return tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)


@triton.jit
def exponential(word):
    """-log(1 - u) for the u of a word, to 5e-7 of it.

    By its series where 1 - u would lose digits of u: the first omitted term is 5e-9 of the sum.
    """
    u = uniform(word)
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * (0.25 + u * 0.2))))
    return tl.where(u < 0.03125, series, -_LN2 * _log2(1.0 - u))


@triton.jit
def gumbel(exponential):
    """-log(x), within 1e-5 of the exact noise."""
    return -_LN2 * _log2(exponential)


@triton.jit
def group_numbers(group, key):
    """The smallest and the second smallest number of every group, and their places in it, 0 to 31."""
    zero, one, two, _ = random_words(group.to(tl.uint32), 1, key)
    first = exponential(zero) * 0.03125
    second = first + exponential(one) * 0.03225806451612903
    place = (two & 31).to(tl.int32)
    return first, second, place, (place + 1 + (((two >> 5) * 31) >> 27).to(tl.int32)) & 31


@triton.jit
def row_word(domain, key):
    """The random word of every row [R] that belongs to no column, of the counter (0, domain, 0, 0)."""
    word, _, _, _ = random_words((key * 0).to(tl.uint32), domain, key)
    return word
