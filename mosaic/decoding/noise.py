"""Random keys of rows: one 64-bit number per (seed, request, step, position), from which kernels make all their noise.

A key depends on nothing else, so a request draws the same tokens alone, in any batch, chunked, cached or not.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from mosaic.kernels.shared.requests import mixed

__all__ = ["key_of", "row_keys"]

_WORD: Final = 2**64 - 1


def row_keys(seed: int, request: int, step: int, positions: Tensor) -> Tensor:
    """Give the keys of some positions of a request at one denoising step, int64 [M].

    key = f(f(f(f(seed) ^ request) ^ step) ^ position), f(x) the finaliser of splitmix64 (Steele, Lea, Flood 2014) of
    x + 0x9E3779B97F4A7C15, everything modulo 2^64.

    `positions`, int64 [M], are in the request's canvas; `seed`, `request` and `step` are taken modulo 2^64.

    Examples
    --------
    >>> row_keys(0, 0, 0, torch.tensor([4, 5])).tolist() == row_keys(0, 0, 0, torch.tensor([5, 4])).flip(0).tolist()
    True
    """
    state = np.uint64(key_of(seed, request, step) & _WORD)
    return torch.from_numpy(mixed(positions.numpy().astype(np.uint64) ^ state).view(np.int64))


def key_of(*words: int) -> int:
    """Return the key of words alone, such as a seed and a request: f(f(seed) ^ request), as a signed number."""
    state = np.zeros(1, dtype=np.uint64)
    for word in words:
        state = mixed(state ^ np.uint64(word & _WORD))
    return int(state.view(np.int64)[0])
