"""top_keys on CUDA: the pages of each prefix with the most attention mass, per set, without sorting and without scratch.

Contract: top_keys(mass[sets, S] float32, captured[B] int32, cu_keys[B+1] int32, owner[B] int64, selected[E, W] int32; slot, sets,
k, page, ratio); updates selected, as `mosaic.registrar.operators.top_keys` says. One program for each sequence and set; lengths are
read on the device alone. The lowest sum that is chosen is found by radix selection: four histograms of eight bits, each of the
pages whose higher bits are those found so far. Then the pages above it are written in ascending order, and of those that tie with
it the lowest ones. Sums are added up again in each pass. Legend: S keys of all prefixes, B sequences, E rows, W numbers of a row.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import power_of_two, tl, triton
from mosaic.kernels.top_keys import check, reference
from mosaic.registrar.operators.top_keys import numbers_of

__all__ = ["launch", "reference"]

# Untuned defaults.
WARPS: Final = 8
ELEMENTS: Final = 4096
"""Masses in a tile of a pass."""
WIDEST: Final = 16
"""Most masses of a page that are added up at a time."""
_BINS: Final = tl.constexpr(256)


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


@triton.jit(do_not_specialize=["slot"])
def top_keys_kernel(
    mass,
    captured,
    cu_keys,
    owner,
    selected,
    mass_stride,
    selected_stride,
    slot,
    ratio,
    SETS: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    sequence = tl.program_id(0)
    own = tl.program_id(1)
    keys = tl.load(captured + sequence)
    if keys > 0:
        pages = tl.cdiv(keys, PAGE)
        count = tl.minimum(pages, PAGES)
        if RATIO:
            count = tl.minimum(count, tl.cdiv(tl.ceil(ratio * keys.to(tl.float32)).to(tl.int32), PAGE))
        mine = mass + own.to(tl.int64) * mass_stride + tl.load(cu_keys + sequence)
        bin = tl.arange(0, _BINS)
        least = keys * 0  # the bits of the lowest chosen sum, as far as they are known
        ties = count  # how many are chosen of the pages with these bits
        for level in tl.static_range(4):
            histogram = tl.zeros([_BINS], tl.int32)
            for start in range(0, pages, BLOCK):
                index = start + tl.arange(0, BLOCK)
                byte = bits_of(mine, index, keys, PAGE, BLOCK_P) >> (24 - 8 * level)
                inside = index < pages
                if level > 0:
                    inside = inside & ((byte >> 8) == least)
                histogram += tl.histogram(byte & 255, _BINS, mask=inside)
            at_least = tl.cumsum(histogram, 0, reverse=True)
            digit = tl.sum((at_least >= ties).to(tl.int32), 0) - 1
            ties -= tl.sum(tl.where(bin == digit, at_least - histogram, 0), 0)
            least = least * 256 + digit
        row = selected + tl.load(owner + sequence) * selected_stride + (slot * SETS + own) * (PAGES + 1)
        tl.store(row, count)
        done = keys * 0
        tied = keys * 0
        for start in range(0, pages, BLOCK):
            index = start + tl.arange(0, BLOCK)
            bits = bits_of(mine, index, keys, PAGE, BLOCK_P)
            inside = index < pages
            tie = (inside & (bits == least)).to(tl.int32)
            lower = tied + tl.cumsum(tie, 0)
            chosen = inside & ((bits > least) | ((bits == least) & (lower <= ties)))
            number = chosen.to(tl.int32)
            tl.store(row + done + tl.cumsum(number, 0), index, mask=chosen)
            done += tl.sum(number, 0)
            tied += tl.sum(tie, 0)


def launch(
    *,
    mass: Tensor,
    captured: Tensor,
    cu_keys: Tensor,
    owner: Tensor,
    selected: Tensor,
    slot: int,
    sets: int,
    k: int,
    page: int,
    ratio: float = 0.0,
    scratch: Tensor | None = None,
) -> None:
    """Write count and pages of each sequence and set into its row of selected [E, W]."""
    check(mass, captured, cu_keys, owner, selected, slot, sets, k, page)
    together = power_of_two(page, WIDEST)
    top_keys_kernel[(owner.shape[0], sets)](
        mass,
        captured,
        cu_keys,
        owner,
        selected,
        mass.stride(0),
        selected.stride(0),
        slot,
        ratio,
        SETS=sets,
        PAGES=numbers_of(k, page) - 1,
        PAGE=page,
        RATIO=ratio > 0,
        BLOCK=ELEMENTS // together,
        BLOCK_P=together,
        num_warps=WARPS,
    )
