"""Carves the typed tiles of a kernel out of its scratch buffer, as its operator's file lists them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mosaic.errors import RuntimeMemoryError
from mosaic.registrar.dtypes import ITEMSIZE
from mosaic.registrar.operator import Spec
from mosaic.registrar.operators import operator
from mosaic.registrar.tiles import TILE_ALIGNMENT, Tile, Tiled
from mosaic.units import round_up


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as plans do.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def carve(scratch: Tensor | None, tiles: tuple[Tile, ...], kernel: str) -> list[Tensor]:
    """View a scratch buffer as tiles, each aligned to 64 bytes; allocates nothing.

    Parameters
    ----------
    scratch
        uint8 [n], written, owned by the caller; may be None if there are no tiles.

    Raises
    ------
    RuntimeMemoryError
        If the buffer is too small for the tiles.
    """
    return _views(scratch, _layout(tiles), kernel)


def beginning(tile: Tensor, shape: Sequence[int]) -> Tensor:
    """View the beginning of a tile in another shape: contiguous whatever that is, so that BLAS gets plain strides."""
    return tile.view(-1)[: math.prod(shape)].view(shape)


def tiles_of(kernel: str, scratch: Tensor | None, operands: dict[str, Tensor], **attrs: Any) -> list[Tensor]:
    """Carve the tiles that the operator's CPU implementation lists for these operands."""
    rule = operator(kernel).implementation("cpu").scratch
    assert isinstance(rule, Tiled), f"{kernel} lists no tiles"
    specs = {name: Spec(tuple(operand.shape), dtype_name(operand.dtype)) for name, operand in operands.items()}
    return carve(scratch, rule.tiles(specs, attrs), kernel)


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Where tiles lie: the bytes they take, what to ask for, and of each dtype, offset (in items), shape and strides."""

    end: int
    needed: int
    places: tuple[tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]], ...]


@lru_cache(maxsize=4096)
def _layout(tiles: tuple[Tile, ...]) -> _Layout:
    """Lay tiles out: a step asks for the same few again and again."""
    offset, places = 0, []
    for tile in tiles:
        offset, item = round_up(offset, TILE_ALIGNMENT), ITEMSIZE[tile.dtype]
        strides = tuple(math.prod(tile.shape[axis + 1 :]) for axis in range(len(tile.shape)))
        places.append((getattr(torch, tile.dtype), offset // item, tuple(tile.shape), strides))
        offset += math.prod(tile.shape) * item
    needed = sum(math.prod(tile.shape) * ITEMSIZE[tile.dtype] + TILE_ALIGNMENT for tile in tiles)
    return _Layout(end=offset, needed=needed, places=tuple(places))


def _views(scratch: Tensor | None, layout: _Layout, kernel: str) -> list[Tensor]:
    if not layout.places:
        return []
    available = 0 if scratch is None else scratch.numel()
    if scratch is None or layout.end > available:
        raise RuntimeMemoryError(
            f"{kernel}: scratch of {available:,} bytes, {layout.needed:,} needed: give the plan's scratch buffer, "
            f"sized by the scratch of {kernel} on the CPU."
        )
    whole: dict[torch.dtype, tuple[Tensor, int]] = {}
    views = []
    for dtype, offset, shape, strides in layout.places:
        if dtype not in whole:
            typed = scratch[: available // dtype.itemsize * dtype.itemsize].view(dtype)
            whole[dtype] = typed, int(typed.storage_offset())
        typed, start = whole[dtype]
        views.append(typed.as_strided(shape, strides, start + offset))
    return views
