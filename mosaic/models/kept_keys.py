"""Where the keys and values of each layer lie in a token's row of the state that keeps them.

Layers may differ in key-value heads and head size, so each has a width and a place of its own. Positions do not matter
here: keys are stored where a sequence has rows, turned by their rotary positions.
"""

from __future__ import annotations

from functools import lru_cache
from math import lcm
from typing import TYPE_CHECKING, Any, NamedTuple

from mosaic.errors import UnsupportedModel

if TYPE_CHECKING:
    from mosaic.models.architecture import Architecture

__all__ = ["KeyRow", "attending", "key_row"]


class KeyRow(NamedTuple):
    """A token's row: its columns, and of each layer the place of its keys, in units of its own keys and values."""

    columns: int
    places: tuple[int, ...]


@lru_cache(maxsize=64)
def key_row(arch: Architecture, windowed: bool | None = None) -> KeyRow:
    """Lay out the keys and values of all layers, or of those with or without a window: the widest first, layers of one width in
    order.

    A layer begins at a multiple of what it keeps, and a row is a multiple of what each layer keeps, so that operators count
    rows and places in layers like their own. Nothing is lost where every width divides the widest.
    """
    widths = {
        number: 2 * layer.attention.kv_width
        for number, layer in enumerate(arch.stack)
        if windowed in (None, layer.attention.window > 0)
    }
    places, end = [0] * arch.layers, 0
    for layer in sorted(widths, key=lambda layer: -widths[layer]):
        places[layer] = -(-end // widths[layer])
        end = (places[layer] + 1) * widths[layer]
    multiple = lcm(*widths.values())
    return KeyRow(-(-end // multiple) * multiple, tuple(places))


def attending(arch: Architecture, layer: int, *, ranges: bool = False) -> dict[str, Any]:
    """Return the attributes of an operator that attends to a layer's kept keys; `ranges`: it is told which a row sees.

    Raises
    ------
    UnsupportedModel
        If the layer sees a window of them, and it is not told.
    """
    own = arch.stack[layer].attention
    if own.window and not ranges:
        raise UnsupportedModel(
            f"layer {layer} sees a window of {own.window} keys, and what was asked for goes by all of them: leave it out."
        )
    place = key_row(arch).places[layer]
    return {"layer": place, "kv_heads": own.kv_heads, "head_size": own.head_size, "scale": own.head_size**-0.5}
