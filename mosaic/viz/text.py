"""A plan's timeline as plain text, for terminals and for the text form in notebooks.

No colour and no escape sequences: block characters only, or `#` for ASCII terminals.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

from mosaic.errors import UsageError
from mosaic.units import format_bytes
from mosaic.viz.profile import Document, LiveProfile, live_profile, optimality, sizes_text

_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_ROWS: Final = 4
_MIN_WIDTH: Final = 24


def sparkline(values: Sequence[int], width: int = 60, *, height: int = 1) -> list[str]:
    """Draw non-negative values as rows of block characters, the top row first.

    Each column is the largest value of its share, so that a peak is never lost; a value above zero is never blank.

    Parameters
    ----------
    values
        The values to draw, left to right.
    width
        The most columns; fewer if there are fewer values.
    height
        Rows of text, eight levels each.

    Examples
    --------
    >>> sparkline([0, 1, 2, 4, 8], width=5)
    [' ▁▂▄█']
    """
    columns = _shares(values, width)
    full = max(columns, default=0) or 1
    levels = [-(-value * 8 * height // full) for value in columns]
    return ["".join(_BLOCKS[max(0, min(8, level - 8 * row))] for level in levels) for row in reversed(range(height))]


def _shares(values: Sequence[int], width: int) -> list[int]:
    count = min(width, len(values))
    return [max(values[i * len(values) // count : (i + 1) * len(values) // count]) for i in range(count)]


def text_timeline(doc: Document, width: int = 80, *, ascii_only: bool = False) -> str:
    """Draw the live bytes of the workspace over the step, with the peak named beneath.

    Parameters
    ----------
    width
        Longest line, in characters; at least 24.
    ascii_only
        Draw with `#` and `^` for terminals whose encoding is not UTF-8.

    Raises
    ------
    UsageError
        If the width is below 24.
    PlanFormatError
        If `doc` is not of schema `mosaic.plan/1`.
    """
    if width < _MIN_WIDTH:
        raise UsageError(f"a timeline of {width} columns cannot be read: give at least {_MIN_WIDTH}.")
    profile = live_profile(doc)
    label = format_bytes(profile.peak_bytes)
    rows = sparkline(profile.total_bytes, width - len(label) - 2, height=_ROWS)
    margins = [label, *[""] * (_ROWS - 2), "0"]
    chart = [f"{margin:>{len(label)}} │{row}".rstrip() for margin, row in zip(margins, rows, strict=True)]
    column = profile.peak_index * len(rows[0]) // max(profile.num_ops, 1)
    pointer = " " * (len(label) + 2 + _first_full(rows[0], column)) + "▲"
    title = f"{doc['model']} {doc['phase']}, {sizes_text(doc)}, {doc['device']}"
    captions = [line for caption in _captions(doc, profile) for line in textwrap.wrap(caption, width)]
    lines = [*textwrap.wrap(title, width), *chart, pointer, *captions]
    text = "\n".join(lines)
    return text.translate(_ASCII) if ascii_only else text


def _first_full(row: str, column: int) -> int:
    """Columns are shares of the ops, so the peak may lie one column to the left of its own: point at the full block."""
    found = row.find("█", max(column - 1, 0))
    return found if found >= 0 else column


def _captions(doc: Document, profile: LiveProfile) -> list[str]:
    if not profile.num_ops:
        return ["no ops"]
    at = f"peak at {doc['ops'][profile.peak_index]['name']} (op {profile.peak_index} of {profile.num_ops})"
    placed = f"workspace {format_bytes(doc['peak_bytes'])}, {optimality(doc)}"
    return [at, f"{placed}; the peak is {profile.peak_to_average:.2f} times the average"]


_ASCII: Final = str.maketrans("│▲" + _BLOCKS, "|^ __######")
