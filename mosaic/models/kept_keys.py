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

__all__ = ["KeyRow", "attending", "attending_within", "key_row"]


class KeyRow(NamedTuple):
    """A token's row: its columns, and of each layer the place of its keys, in units of its own keys and values."""

    columns: int
    places: tuple[int, ...]


@lru_cache(maxsize=64)
def key_row(arch: Architecture) -> KeyRow:
    """Lay out the keys and values of all layers: the widest first, layers of one width in order.

    A layer begins at a multiple of what it keeps, and a row is a multiple of what each layer keeps, so that operators count
    rows and places in layers like their own. Nothing is lost where every width divides the widest.
    """
    widths = [2 * layer.attention.kv_width for layer in arch.stack]
    places, end = [0] * len(widths), 0
    for layer in sorted(range(len(widths)), key=lambda layer: -widths[layer]):
        places[layer] = -(-end // widths[layer])
        end = (places[layer] + 1) * widths[layer]
    multiple = lcm(*widths)
    return KeyRow(-(-end // multiple) * multiple, tuple(places))


def attending(arch: Architecture, layer: int) -> dict[str, Any]:
    """Return the attributes of an operator that attends to all kept keys of a layer.

    Raises
    ------
    UnsupportedModel
        If the layer sees a window of them.
    """
    attention = arch.stack[layer].attention
    if attention.window:
        raise UnsupportedModel(
            f"layer {layer} sees a window of {attention.window} keys, and what was asked for goes by all of them: leave it out."
        )
    return attending_within(arch, layer)


def attending_within(arch: Architecture, layer: int) -> dict[str, Any]:
    """Return the same of an operator that is told which keys a row sees."""
    attention = arch.stack[layer].attention
    return {
        "layer": key_row(arch).places[layer], "kv_heads": attention.kv_heads, "head_size": attention.head_size,
        "scale": attention.head_size**-0.5,
    }  # fmt: skip
