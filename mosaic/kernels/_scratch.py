"""Carves the typed tiles of a kernel out of its scratch buffer, by `mosaic.registrar.implementations.cpu`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mosaic.errors import RuntimeMemoryError
from mosaic.registrar.implementations.cpu import ITEM_BYTES, TILE_ALIGNMENT, TILES, Tile
from mosaic.units import round_up

__all__ = ["carve", "dtype_name", "tiles_of"]


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
    views: list[Tensor] = []
    offset, available = 0, 0 if scratch is None else scratch.numel()
    for tile in tiles:
        size = math.prod(tile.shape) * ITEM_BYTES[tile.dtype]
        offset = round_up(offset, TILE_ALIGNMENT)
        if scratch is None or offset + size > available:
            needed = sum(math.prod(t.shape) * ITEM_BYTES[t.dtype] + TILE_ALIGNMENT for t in tiles)
            raise RuntimeMemoryError(
                f"{kernel}: scratch of {available:,} bytes, {needed:,} needed: give the plan's scratch buffer, "
                f"sized by SCRATCH['{kernel}']."
            )
        views.append(scratch[offset : offset + size].view(getattr(torch, tile.dtype)).view(tile.shape))
        offset += size
    return views


def tiles_of(kernel: str, scratch: Tensor | None, operands: dict[str, Tensor], **attrs: Any) -> list[Tensor]:
    """Carve the tiles that `TILES[kernel]` lists for these operands."""
    shapes = {name: tuple(operand.shape) for name, operand in operands.items()}
    dtypes = {name: dtype_name(operand.dtype) for name, operand in operands.items()}
    return carve(scratch, TILES[kernel](shapes, dtypes, attrs), kernel)
