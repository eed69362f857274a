"""Random keys of rows: one 64-bit number per (seed, request, step, position), from which kernels make all their noise.

A key depends on nothing else, so a request draws the same tokens alone, in any batch, chunked, cached or not.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

__all__ = ["row_keys"]

_WORD: Final = 2**64 - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


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
    state = 0
    for word in (seed, request, step):
        state = int(_mixed(np.array([state ^ (word & _WORD)], dtype=np.uint64))[0])
    keys = _mixed(positions.numpy().astype(np.uint64) ^ np.uint64(state))
    return torch.from_numpy(keys.view(np.int64))


def _mixed(words: np.ndarray[tuple[int, ...], np.dtype[np.uint64]]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    mixed = words + np.uint64(_GOLDEN)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
    return mixed ^ (mixed >> np.uint64(31))
