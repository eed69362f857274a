"""The one import of triton, and what the launchers share: tile shapes and tile widths."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from mosaic.errors import MissingExtra
from mosaic.kernels.card import card_ahead

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise MissingExtra("triton", "torch", "a CUDA kernel") from error
try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # before Triton 3.4
    TensorDescriptor = None

__all__ = [
    "DOT_MINIMUM",
    "TensorDescriptor",
    "Tile",
    "has_descriptors",
    "power_of_two",
    "processors",
    "since",
    "tile_for",
    "tl",
    "triton",
]

T = TypeVar("T")

DOT_MINIMUM: Final = 16
"""Smallest side of a tile that tl.dot takes."""
DESCRIBED: Final = {0: False, 90: True, 100: False}
"""From which architecture on loads go through tensor descriptors; the tiles for them are compiled for Hopper alone."""
PROCESSORS: Final = 132
"""Multiprocessors where the device is no GPU: an H200's."""


class Tile(NamedTuple):
    """Tile of a product, and how the GPU runs it."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


def power_of_two(width: int, most: int, least: int = 1) -> int:
    """Round `width` up to a power of two between `least` and `most`; Triton's tiles have no other widths.

    >>> power_of_two(300, most=4096)
    512
    """
    return max(least, min(most, 1 << max(width - 1, 0).bit_length()))


def tile_for(tiles: Mapping[int, Tile], operand: Tensor) -> Tile:
    """Choose the tile for the item size of `operand`: 16-bit or 32-bit."""
    return tiles[max(2, min(operand.element_size(), 4))]


def since(tables: Mapping[int, T], operand: Tensor) -> T:
    """Choose by compute capability (90: sm_90): the entry of the newest architecture that is not newer than the card.

    The tables say what holds from an architecture on, up to the next one listed.
    """
    card = capability(operand)
    return tables[max((listed for listed in tables if listed <= card), default=min(tables))]


def has_descriptors(x: Tensor, weight: Tensor) -> bool:
    """Tell whether the GPU loads tiles by descriptor and these matrices are aligned to the 16 bytes that it asks for."""
    if TensorDescriptor is None or x.element_size() != 2 or not since(DESCRIBED, x):
        return False
    return all(t.data_ptr() % 16 == 0 and 2 * t.stride(0) % 16 == 0 for t in (x, weight))


def capability(operand: Tensor) -> int:
    """Compute capability of the operand's device; 0 where it is no GPU (the interpreter)."""
    ahead = card_ahead()
    if ahead is not None:
        return ahead.capability
    return _capability(operand.device) if operand.is_cuda else 0


@cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def processors(device: torch.device) -> int:
    """Count the multiprocessors of a device."""
    ahead = card_ahead()
    if ahead is not None:
        return ahead.processors
    return _processors(device) if device.type == "cuda" else PROCESSORS


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
