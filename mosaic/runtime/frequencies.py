"""Rotary frequencies in float32, operation for operation as the reference models compute them.

Formulas: `mosaic.models.rotary`. Computed on the CPU: a step needs a few numbers per sequence.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mosaic.models.rotary import Rotary


def inverse_frequencies(rotary: Rotary, length: int = 0) -> Tensor:
    """Compute the angle that each pair of dims turns per position.

    Parameters
    ----------
    length
        Of the sequence. Only `dynamic` frequencies depend on it, and only beyond the trained positions.

    Returns
    -------
    Tensor
        float32 [dim / 2].

    Examples
    --------
    >>> inverse_frequencies(Rotary(theta=100.0, dim=4)).tolist()
    [1.0, 0.10000000149011612]
    """
    plain = 1.0 / (_base(rotary, length) ** _exponents(rotary.dim))
    if rotary.kind == "linear":
        return plain / rotary.factor
    if rotary.kind == "yarn":
        kept = _kept(rotary)
        stretched = 1.0 / (rotary.factor * rotary.theta ** _exponents(rotary.dim))
        return stretched * (1 - kept) + plain * kept
    if rotary.kind == "llama3":
        return _by_wavelength(rotary, plain)
    return plain


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim


def _base(rotary: Rotary, length: int) -> Tensor | float:
    """The base, raised for a sequence longer than the trained positions (dynamic NTK)."""
    if rotary.kind != "dynamic" or length <= rotary.original:
        return rotary.theta
    stretch = torch.tensor(rotary.factor * length / rotary.original, dtype=torch.float32) - (rotary.factor - 1)
    return rotary.theta * stretch ** (rotary.dim / (rotary.dim - 2))


def _kept(rotary: Rotary) -> Tensor:
    """The share of each pair's own frequency that YaRN keeps: from 1 for fast pairs to 0 for slow ones."""
    low, high = (_pair_that_turns(rotary, turns) for turns in (rotary.fast, rotary.slow))
    if rotary.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.dim - 1)
    width = high - low or 0.001
    return 1 - ((torch.arange(rotary.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


def _pair_that_turns(rotary: Rotary, turns: float) -> float:
    """Return the pair of dims, as a real number, that makes this many turns in the trained positions."""
    return rotary.dim * math.log(rotary.original / (turns * 2 * math.pi)) / (2 * math.log(rotary.theta))


def _by_wavelength(rotary: Rotary, plain: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those in between interpolated."""
    wavelength = 2 * math.pi / plain
    share = (rotary.original / wavelength - rotary.slow) / (rotary.fast - rotary.slow)
    between = (1 - share) * plain / rotary.factor + share * plain
    outside = torch.where(wavelength > rotary.original / rotary.slow, plain / rotary.factor, plain)
    inside = (wavelength <= rotary.original / rotary.slow) & (wavelength >= rotary.original / rotary.fast)
    return torch.where(inside, between, outside)
