"""Products of few rows, as the plan must know them: how weights are cut into tiles of columns, and these into splits over inputs.

Of few rows every product reads its whole weight and computes next to nothing: it takes as long as the reading. So tiles are
of weights, each multiplied by all rows at once. Where there are fewer tiles than programs that a GPU runs, each is split over its
inputs: splits leave partial sums in scratch and count themselves in `arrivals`; the last to arrive adds them up, in order. How
tiles are split depends on the weights alone, so what a row comes to depends on no other row.
"""

from __future__ import annotations

from typing import Final

from mosaic.registrar.operator import Dim, require

FEW_ROWS: Final = 64
"""Most rows that are taken at a time: more are as many launches."""
COLUMNS: Final = 64
"""Columns of the product, rows of the weight, in a tile."""
MOST_SPLITS: Final = 4
SPLIT_INNER: Final = 512
"""Least inputs that are worth a split of their own."""


def tile_count(*columns: Dim) -> int:
    """Count the tiles of products, one for each number of columns.

    >>> tile_count(4096, 1024, 1024), tile_count(100)
    (96, 2)
    """
    return sum(-(-int(count) // COLUMNS) for count in columns)


def split_count(tiles: int, inner: Dim, programs: int) -> int:
    """Count the splits of each tile over `inner` inputs, where `programs` of all tiles together are enough for a GPU.

    >>> split_count(96, 4096, 384), split_count(64, 12288, 160), split_count(296, 3584, 160), split_count(1, 1100, 160)
    (4, 2, 1, 2)
    """
    return max(1, min(programs // tiles, int(inner) // SPLIT_INNER, MOST_SPLITS))


def partial_floats(tiles: int, splits: int) -> int:
    """Count the float32 that splits leave: a sum for every row and column, and one of squares for every row.

    >>> partial_floats(96, 2) == 96 * 2 * 64 * (64 + 1), partial_floats(300, 1)
    (True, 0)
    """
    return tiles * splits * FEW_ROWS * (COLUMNS + 1) if splits > 1 else 0


def require_arrivals(arrivals: Dim, tiles: int) -> None:
    """Refuse counts that are too few."""
    require(bool(arrivals >= tiles), f"arrivals must be int32[{tiles}] at least, not int32[{arrivals}]")
