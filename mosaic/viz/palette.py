"""One colour per category, the same in every picture and report.

Okabe and Ito's palette, distinct under the common colour blindnesses; scratch and other buffers are grey.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

COLORS: Final[Mapping[str, str]] = {
    "weights": "#5B7083",
    "state": "#F0E442",
    "inputs": "#8C6BB1",
    "hidden": "#0072B2",
    "attention": "#E69F00",
    "ffn": "#009E73",
    "logits and head": "#D55E00",
    "statistics": "#CC79A7",
    "scratch": "#8A8A8A",
    "other": "#56B4E9",
}
"""Category -> hex colour; its keys are those of `profile.CATEGORIES`."""

PEAK_COLOR: Final = "#1A1A1A"
LIMIT_COLOR: Final = "#B2182B"


def ink_on(color: str) -> str:
    """Return the text colour, black or white, that is more readable on a hex colour.

    >>> ink_on("#F0E442"), ink_on("#0072B2")
    ('#1A1A1A', '#FFFFFF')
    """
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return PEAK_COLOR if 299 * red + 587 * green + 114 * blue > 130_000 else "#FFFFFF"
