"""The columns of each layer's keys and values in a token's row of the state.

Layers may differ in key-value heads and head size, so each has its own width and place. Row numbers are independent of
positions: keys are stored with their rotation in whatever rows a sequence owns.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import lcm
from typing import TYPE_CHECKING, Any, NamedTuple

from mosaic.errors import UnsupportedModel

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture

__all__ = ["KeyRow", "attending", "head_row", "key_row"]


class KeyRow(NamedTuple):
    """A token's row: its columns, and each layer's place, in units of that layer's keys and values."""

    columns: int
    places: tuple[int, ...]


@lru_cache(maxsize=64)
def key_row(arch: Architecture, windowed: bool | None = None) -> KeyRow:
    """Lay out the keys and values of all layers, or of those with or without a window: the widest first, layers of one width in
    order.

    A layer begins at a multiple of its width, and a row is a multiple of every layer's width, so that operators can
    count rows and places in widths of their own layer. No column is unused if every width divides the widest.
    """
    return _row(
        arch.layers,
        {
            number: 2 * layer.attention.kv_width
            for number, layer in enumerate(arch.stack)
            if windowed in (None, layer.attention.window > 0)
        },
    )


@lru_cache(maxsize=64)
def head_row(arch: Architecture) -> KeyRow:
    """Lay out two numbers for each key-value head of all layers likewise."""
    return _row(arch.layers, {number: 2 * layer.attention.kv_heads for number, layer in enumerate(arch.stack)})


def _row(layers: int, widths: Mapping[int, int]) -> KeyRow:
    places, end = [0] * layers, 0
    for layer in sorted(widths, key=lambda layer: -widths[layer]):
        places[layer] = -(-end // widths[layer])
        end = (places[layer] + 1) * widths[layer]
    multiple = lcm(*widths.values())
    return KeyRow(-(-end // multiple) * multiple, tuple(places))


def attending(arch: Architecture, layer: int, *, ranges: bool = False) -> dict[str, Any]:
    """Return the attributes of an operator that attends to a layer's kept keys; `ranges`: an operand has visible keys.

    Raises
    ------
    UnsupportedModel
        If the layer has a window and no operand gives the visible keys.
    """
    own = arch.stack[layer].attention
    if own.window and not ranges:
        raise UnsupportedModel(
            f"layer {layer} sees a window of {own.window} keys, and what was asked for goes by all of them: leave it out."
        )
    place = key_row(arch).places[layer]
    return {"layer": place, "kv_heads": own.kv_heads, "head_size": own.head_size, "scale": own.head_size**-0.5}
