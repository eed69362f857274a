"""top_keys on CUDA: the pages of each prefix with the most attention mass, per set, without sorting.

The lowest sum that is chosen is found by bisection over the bits of float32, which order as the sums do: of pages in
registers, a count for each bit. Then the pages above it are written in ascending order, and of those that tie with it
the lowest ones. Where a sum of masses is enough, the bisection adds up those above too. Long prefixes are cut into
parts: a first launch counts the pages of each part by bins of their sums; a second lists those at or above the bin in
which the lowest chosen sum must be, and the last program of a prefix and set to have listed its part chooses among
these. If too many share that bin, it chooses among all pages. Lengths are read on the device alone, and sums are added
up again in each pass. Legend: S keys of all prefixes, B sequences, E rows, W numbers of a row.
"""

from functools import partial
from typing import Final

import torch
from torch import Tensor

from mosaic.kernels.cuda.shared.launching import power_of_two, tl, triton
from mosaic.kernels.cuda.shared.scratch import floats_of
from mosaic.registrar.operators.top_keys import BINS, LISTED, PLACED, fraction_of, numbers_of, parts_of

# On one H200, of 8 sets 1,024 keys each: of 256 keys 5.8 us, of 131,072 29; with tiles of 4,096 pages 32 (39 with 16 warps), with
# tiles of 1,024 pages 40. 64 of 8,192 pages whose bounds lie within a factor of two: 19 us.
TILE: Final = 2048
"""Pages that a program has in registers when it chooses."""
WARPS: Final = 8
LEAST: Final = 256
"""Fewest sums in a tile."""
PASSED: Final = 1024
"""Masses in a tile of a pass over a part."""
PASS_WARPS: Final = 8
WIDEST: Final = 16
"""Most masses of a page that are added up at a time."""
SAMPLED: Final = 32
"""Pages of a prefix, as far apart as can be, by whose sums its bins are placed: with 128 a launch takes 8 us longer."""
_BINS: Final = tl.constexpr(BINS)


@triton.jit
def bits_of(mass, index, keys, PAGE: tl.constexpr, BLOCK_P: tl.constexpr):
    """Sums of some pages, as integers that order as they do: none is below 0."""
    if PAGE == 1:
        sums = tl.load(mass + index, mask=index < keys, other=0.0)
    else:
        sums = tl.zeros_like(index).to(tl.float32)
        for start in tl.static_range(0, PAGE, BLOCK_P):
            within = start + tl.arange(0, BLOCK_P)[None, :]
            key = index[:, None] * PAGE + within
            sums += tl.sum(tl.load(mass + key, mask=(within < PAGE) & (key < keys), other=0.0), 1)
    return sums.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def bins_of(mass, keys, pages, count, PAGE: tl.constexpr, BLOCK_P: tl.constexpr, SAMPLED: tl.constexpr):
    """Where the bins of a prefix begin, in bits, and the binary logarithm of their width: around the lowest chosen sum."""
    index = (tl.arange(0, SAMPLED).to(tl.int64) * pages // SAMPLED).to(tl.int32)
    sums = bits_of(mass, index, keys, PAGE, BLOCK_P)
    reach = tl.sum((sums[None, :] >= sums[:, None]).to(tl.int32), 1)  # how many are as large as each
    rank = count.to(tl.float32) * SAMPLED / tl.maximum(pages, 1).to(tl.float32)
    beside = 4.0 * tl.sqrt(rank) + 4.0  # four standard deviations of the rank, were the sample random
    least = tl.max(tl.where(reach > (rank + beside).to(tl.int32), sums, 0), 0)
    largest = tl.max(tl.where(reach > tl.maximum(rank - beside, 0.0).to(tl.int32), sums, 0), 0)
    # beyond the largest of a sample are many, of a long prefix: bins reach as far again
    width = tl.where(rank < beside, 2, 1) * ((largest - least) // _BINS) + 1
    return least, tl.sum(((width >> tl.arange(0, 32)) > 0).to(tl.int32), 0)


@triton.jit
def bin_of(bits, least, shift):
    """A bin that ascends with the sum: the first of all sums below `least`, the last of all that are above the others."""
    return tl.where(bits < least, 0, tl.minimum(((bits - least) >> shift) + 1, _BINS - 1))


@triton.jit
def count_of(keys, numerator, denominator, PAGES: tl.constexpr, PAGE: tl.constexpr, RATIO: tl.constexpr):
    """The number of pages of a prefix to choose: for a share of its keys, in 64 bits."""
    count = tl.minimum(tl.cdiv(keys, PAGE), PAGES)
    if RATIO:
        count = tl.minimum(count, tl.cdiv(tl.cdiv(keys.to(tl.int64) * numerator, denominator).to(tl.int32), PAGE))
    return count


@triton.jit
def items_of(mass, listed, index, items, keys, LISTED: tl.constexpr, PAGE: tl.constexpr, BLOCK_P: tl.constexpr):
    """Pages of some items, and the bits of their sums, -1 where there is none. Items are the `listed` pages if few, or all."""
    page = index
    if LISTED > 0:
        page = tl.where(
            items <= LISTED, tl.load(listed + index, mask=index < tl.minimum(items, LISTED), other=0), index
        )
    return page, tl.where(index < items, bits_of(mass, page, keys, PAGE, BLOCK_P), -1)


@triton.jit
def weight_of(bits, least, ENOUGH: tl.constexpr):
    """The total of the sums from one on, if asked for."""
    weight = 0.0
    if ENOUGH:
        weight = tl.sum(tl.where(bits >= least, bits.to(tl.float32, bitcast=True), 0.0), 0)
    return weight


@triton.jit
def choose(
    mass, listed, items, keys, count, enough, row, ENOUGH: tl.constexpr, LISTED: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Write the `count` items with the largest sums, in their order; of equal ones the first. With ENOUGH fewer, where their sums
    add up to `enough`."""
    item = tl.arange(0, BLOCK)
    page, bits = items_of(mass, listed, item, items, keys, LISTED, PAGE, BLOCK_P)
    # the lowest sum that is chosen: at least `count` items reach `least`, and `above` of them, fewer, reach `beyond`; or their
    # sums are enough, and the `weight` of those beyond is not
    least = tl.min(tl.where(item < items, bits, 0x7FFFFFFF), 0)
    beyond = tl.max(bits, 0) + 1
    for start in range(BLOCK, items, BLOCK):
        page, more = items_of(mass, listed, start + item, items, keys, LISTED, PAGE, BLOCK_P)
        least = tl.minimum(least, tl.min(tl.where(start + item < items, more, 0x7FFFFFFF), 0))
        beyond = tl.maximum(beyond, tl.max(more, 0) + 1)
    above = items * 0
    weight = 0.0
    while beyond - least > 1:
        middle = least + (beyond - least) // 2
        reach = tl.sum((bits >= middle).to(tl.int32), 0)
        gathered = weight_of(bits, middle, ENOUGH)
        for start in range(BLOCK, items, BLOCK):
            page, more = items_of(mass, listed, start + item, items, keys, LISTED, PAGE, BLOCK_P)
            reach += tl.sum((more >= middle).to(tl.int32), 0)
            gathered += weight_of(more, middle, ENOUGH)
        stays = reach >= count
        if ENOUGH:
            stays = stays | (gathered >= enough)
        least = tl.where(stays, middle, least)
        beyond = tl.where(stays, beyond, middle)
        above = tl.where(stays, above, reach)
        weight = tl.where(stays, weight, gathered)
    ties = count - above
    if ENOUGH:
        each = least.to(tl.float32, bitcast=True)
        wanted = tl.where(each > 0, tl.ceil((enough - weight) / tl.where(each > 0, each, 1.0)), ties.to(tl.float32))
        ties = tl.minimum(tl.maximum(wanted, 1.0), ties.to(tl.float32)).to(tl.int32)
    done = items * 0
    tied = items * 0
    for start in range(0, items, BLOCK):
        page, bits = items_of(mass, listed, start + item, items, keys, LISTED, PAGE, BLOCK_P)
        tie = (bits == least).to(tl.int32)
        chosen = (bits > least) | ((bits == least) & (tied + tl.cumsum(tie, 0) <= ties))
        number = chosen.to(tl.int32)
        tl.store(row + done + tl.cumsum(number, 0), page, mask=chosen)
        done += tl.sum(number, 0)
        tied += tl.sum(tie, 0)
    tl.store(row, done)


@triton.jit
def share_of(pages, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The pages of one part: whole tiles."""
    return tl.cdiv(tl.cdiv(pages, PARTS), BLOCK) * BLOCK


@triton.jit(do_not_specialize=["numerator", "denominator"])
def histogram_kernel(
    mass,
    captured,
    cu_keys,
    counts,
    arrived,
    placed,
    mass_stride,
    numerator,
    denominator,
    SETS: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    RATIO: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SAMPLED: tl.constexpr,
):
    """The number of pages of one part of a prefix in each bin, and the bins' places."""
    part = tl.program_id(0)
    own = tl.program_id(1)
    sequence = tl.program_id(2)
    keys = tl.load(captured + sequence)
    mine = mass + own.to(tl.int64) * mass_stride + tl.load(cu_keys + sequence)
    pages = tl.cdiv(keys, PAGE)
    share = share_of(pages, PARTS, BLOCK)
    least, shift = bins_of(
        mine, keys, pages, count_of(keys, numerator, denominator, PAGES, PAGE, RATIO), PAGE, BLOCK_P, SAMPLED
    )
    bin = tl.arange(0, _BINS)
    histogram = tl.zeros([_BINS], tl.int32)
    for start in range(part * share, tl.minimum(pages, part * share + share), BLOCK):
        index = start + tl.arange(0, BLOCK)
        bins = bin_of(bits_of(mine, index, keys, PAGE, BLOCK_P), least, shift)
        histogram += tl.histogram(bins, _BINS, mask=index < pages)
    pair = sequence * SETS + own
    tl.store(counts + (pair * PARTS + part) * _BINS + bin, histogram)
    if part == 0:
        tl.store(arrived + pair, 0)
        tl.store(placed + 2 * pair, least)
        tl.store(placed + 2 * pair + 1, shift)


@triton.jit(do_not_specialize=["slot", "numerator", "denominator"])
def parted_kernel(
    mass,
    captured,
    cu_keys,
    owner,
    selected,
    counts,
    arrived,
    placed,
    lists,
    mass_stride,
    selected_stride,
    slot,
    numerator,
    denominator,
    enough,
    SETS: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    RATIO: tl.constexpr,
    ENOUGH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    TILE: tl.constexpr,
    TILE_P: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Lists the pages of one part that may be chosen; the program that is the last of a prefix and set to do so chooses."""
    part = tl.program_id(0)
    own = tl.program_id(1)
    sequence = tl.program_id(2)
    pair = sequence * SETS + own
    keys = tl.load(captured + sequence)
    if keys > 0:
        pages = tl.cdiv(keys, PAGE)
        count = count_of(keys, numerator, denominator, PAGES, PAGE, RATIO)
        mine = mass + own.to(tl.int64) * mass_stride + tl.load(cu_keys + sequence)
        least = tl.load(placed + 2 * pair)
        shift = tl.load(placed + 2 * pair + 1)
        bin = tl.arange(0, _BINS)
        every = tl.arange(0, PARTS)
        histograms = tl.load(counts + (pair * PARTS + every[:, None]) * _BINS + bin[None, :])
        at_least = tl.cumsum(tl.sum(histograms, 0), 0, reverse=True)
        # the bin of the lowest sum that is chosen
        lowest = tl.sum((at_least >= count).to(tl.int32), 0) - 1
        kept = tl.sum(tl.where(bin[None, :] >= lowest, histograms, 0), 1)
        items = tl.sum(kept, 0)
        listed = lists + pair * LISTED
        if items <= LISTED:
            done = tl.sum(tl.where(every < part, kept, 0), 0)
            share = share_of(pages, PARTS, BLOCK)
            for start in range(part * share, tl.minimum(pages, part * share + share), BLOCK):
                index = start + tl.arange(0, BLOCK)
                bins = bin_of(bits_of(mine, index, keys, PAGE, BLOCK_P), least, shift)
                number = ((index < pages) & (bins >= lowest)).to(tl.int32)
                tl.store(listed + done + tl.cumsum(number, 0) - 1, index, mask=number > 0)
                done += tl.sum(number, 0)
            tl.debug_barrier()  # the whole program has written
        if tl.atomic_add(arrived + pair, 1, sem="acq_rel") == PARTS - 1:
            row = selected + tl.load(owner + sequence) * selected_stride + (slot * SETS + own) * (PAGES + 1)
            items = tl.where(items <= LISTED, items, pages)
            choose(mine, listed, items, keys, count, enough, row, ENOUGH, LISTED, PAGE, TILE, TILE_P)


@triton.jit(do_not_specialize=["slot", "numerator", "denominator"])
def whole_kernel(
    mass,
    captured,
    cu_keys,
    owner,
    selected,
    mass_stride,
    selected_stride,
    slot,
    numerator,
    denominator,
    enough,
    SETS: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    RATIO: tl.constexpr,
    ENOUGH: tl.constexpr,
    TILE: tl.constexpr,
    TILE_P: tl.constexpr,
):
    """Chooses of all pages of a prefix at once."""
    own = tl.program_id(0)
    sequence = tl.program_id(1)
    keys = tl.load(captured + sequence)
    mine = mass + own.to(tl.int64) * mass_stride + tl.load(cu_keys + sequence)
    row = selected + tl.load(owner + sequence) * selected_stride + (slot * SETS + own) * (PAGES + 1)
    if keys > 0:
        count = count_of(keys, numerator, denominator, PAGES, PAGE, RATIO)
        choose(mine, captured, tl.cdiv(keys, PAGE), keys, count, enough, row, ENOUGH, 0, PAGE, TILE, TILE_P)


def launch(
    *, mass: Tensor, captured: Tensor, cu_keys: Tensor, owner: Tensor, selected: Tensor, slot: int, sets: int, k: int,
    page: int, ratio: float = 0.0, enough: float = 0.0, fixed: bool = False, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write count and pages of each sequence and set into its row of selected [E, W].

    Which sums are the largest does not depend on the order of additions; with `enough`, what they add up to does: then, if
    `fixed`, one program adds them in tiles of one width.
    """
    sequences = owner.shape[0]
    together = power_of_two(page, WIDEST)
    chosen = {"SETS": sets, "PAGES": numbers_of(k, page) - 1, "PAGE": page, "RATIO": ratio > 0}
    chosen["ENOUGH"] = enough > 0
    share = fraction_of(ratio) if ratio else (0, 1)
    state = (owner, selected)
    strides = (mass.stride(0), selected.stride(0), slot, *share, enough)
    mean_pages = -(-mass.shape[1] // (sequences * page))
    fixed = fixed and enough > 0
    if mean_pages <= TILE or fixed:
        tile = TILE // together if fixed else power_of_two(mean_pages, TILE // together, least=LEAST)
        whole_kernel[(sets, sequences)](
            mass, captured, cu_keys, *state, *strides, **chosen, TILE=tile, TILE_P=together, num_warps=warps_for(tile)
        )
        return
    pairs, parts = sequences * sets, parts_of(sequences * sets)
    integers = floats_of("top_keys", scratch, parts * pairs * BINS + pairs * (1 + PLACED + LISTED)).view(torch.int32)
    sizes = [parts * pairs * BINS, pairs, PLACED * pairs, LISTED * pairs]
    counts, arrived, placed, lists = torch.split(integers, sizes)
    histogram_kernel[(parts, sets, sequences)](
        mass, captured, cu_keys, counts, arrived, placed, mass.stride(0), *share, SETS=sets, PAGES=chosen["PAGES"], PAGE=page,
        RATIO=chosen["RATIO"], PARTS=parts, BLOCK=PASSED // together, BLOCK_P=together, SAMPLED=SAMPLED, num_warps=PASS_WARPS,
    )  # fmt: skip
    parted_kernel[(parts, sets, sequences)](
        mass, captured, cu_keys, *state, counts, arrived, placed, lists, *strides, **chosen, PARTS=parts,
        BLOCK=PASSED // together, BLOCK_P=together, TILE=TILE // together, TILE_P=together, LISTED=LISTED, num_warps=WARPS,
    )  # fmt: skip


def warps_for(tile: int) -> int:
    """Choose the warps of a program by the number of sums in its registers: 8 a thread, or more."""
    return max(1, min(WARPS, tile // 256))


launch_invariant = partial(launch, fixed=True)
