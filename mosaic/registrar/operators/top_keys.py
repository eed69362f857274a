"""Write into selected[E, W] the pages of its prefix that each sequence attends to: by the largest mass, per set.

MAGE (arXiv 2602.14209, section 4, equation 3 and Algorithm 1): `page` 1 is the published choice. Sequence b has
captured[b] = P keys in its prefix, with masses mass[s, cu_keys[b]] and the P - 1 after it (`key_mass`), none below 0. A
page is `page` neighbouring keys from a multiple of `page` on, cut at P. The pages with the largest sums of mass are
chosen, summed in float32; ties go to the lower page. Their number is the smaller of k / page and the number of pages;
with a `ratio` above 0 it is also at most the number of pages that hold `keys_of(ratio, P)` keys. With `enough` above 0
it is the fewest of these pages whose masses add up to it, in float32: near that sum the number may differ by one page.

`selected` is a state with one row per sequence: sequence b has row owner[b]. For every sparse layer (`slot` is its
index among them) and every set it holds 1 + k / page numbers: the count, then the indices of the chosen pages,
ascending. Numbers after them are unchanged, as are all numbers of a sequence with P = 0, and of other slots.
"""

from fractions import Fraction
from functools import lru_cache
from typing import Final

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Specs, divides, exact, require
from mosaic.registrar.tiles import Tile, Tiles


def rules(*, W: Dim, slot: int, sets: int, k: int, page: int, ratio: float, enough: float, **_: object) -> None:
    require_selection(W, slot, sets, k, page)
    require(0 <= ratio <= 1, f"ratio must be a share of the keys, or 0 for none, not {ratio}")
    require(enough >= 0, f"enough must be a sum of masses, or 0 for none, not {enough}")


def require_selection(width: Dim, slot: int, sets: int, k: int, page: int) -> None:
    """Refuse rows of `selected`, of `width` numbers, without room for this slot's pages."""
    require(page > 0 and k > 0 and k % page == 0, f"k must be whole pages of {page} keys, not {k}")
    numbers = sets * numbers_of(k, page)
    require(divides(numbers, width), f"selected must be int32[rows, slots * {numbers}], it has {width} columns")
    slots = exact(width) / numbers
    require(bool(0 <= slot < slots), f"selected has {slots} slots of {numbers} numbers, not slot {slot}")


def numbers_of(k: int, page: int) -> int:
    """Return the numbers per set in a row of `selected`: a count, and the pages.

    >>> numbers_of(512, 16)
    33
    """
    return 1 + k // page


@lru_cache(maxsize=256)
def fraction_of(ratio: float) -> tuple[int, int]:
    """Return numerator and denominator of a ratio above 0: the nearest fraction with a denominator of at most 10^9.

    So a decimal of up to nine places, or a fraction such as 5/6, is exact, though its float is not.

    >>> fraction_of(0.15), fraction_of(5 / 6)
    ((3, 20), (5, 6))
    """
    return max(Fraction(ratio).limit_denominator(10**9), Fraction(1, 10**9)).as_integer_ratio()


def keys_of(ratio: float, keys: int) -> int:
    """Return `ratio` of `keys` keys, rounded up, for a ratio above 0.

    >>> keys_of(0.15, 100), keys_of(0.15, 101)
    (15, 16)
    """
    numerator, denominator = fraction_of(ratio)
    return -(-numerator * keys // denominator)


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List the tiles in which the pages of one sequence are sorted."""
    keys = specs["mass"].shape[1]
    return Tile((keys,), "int64"), Tile((keys,), "float32"), Tile((keys,), "int32")


BINS: Final = 256
"""Bins of a histogram of sums."""
LISTED: Final = 4096
"""Most pages of a prefix and set that are listed as candidates."""
PLACED: Final = 2
"""Numbers that describe the bins of a prefix and set."""
PARTS: Final = 256
"""Parts that prefixes are cut into, for all sequences and sets together."""
MOST_PARTS: Final = 32


def parts_of(pairs: int) -> int:
    """Count the parts that each prefix is cut into, a power of two, for `pairs` sequences times sets.

    >>> [parts_of(pairs) for pairs in (1, 8, 48, 1000)]
    [32, 32, 4, 1]
    """
    return 1 << max(0, min(MOST_PARTS, PARTS // pairs).bit_length() - 1)


def lists(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve histograms of all parts; and a counter, the place of bins, and a list for each sequence and set."""
    pairs = specs["owner"].shape[0] * attrs["sets"]
    return 4 * (PARTS * BINS + pairs * (BINS + 1 + PLACED + LISTED))


OPERATOR = Operator(
    name="top_keys",
    operands="mass@:f32[sets, S] captured@:i32[B] cu_keys@:i32[B+1] owner@:i64[B] selected!@#:i32[E, W]",
    attrs="slot sets k page ratio=0.0 enough=0.0",
    rules=rules,
    moved={"selected": "B*sets + B*sets*k/page"},
    implementations=kernels_of("top_keys", tiles=tiles, scratch=lists, invariant="top_keys:launch_invariant"),
    roles={"mass": "statistics", "selected": "statistics"},
)
