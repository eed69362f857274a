"""Products of few rows, as plans count them: weights are cut into tiles of columns, tiles into splits over the inputs.

With few rows a product takes as long as reading its weight. So tiles are of weights, each multiplied by all rows at
once. If there are fewer tiles than a GPU runs programs, each tile is split over its inputs: splits write partial sums
to scratch and count themselves in `arrivals`; the last to arrive adds the sums in order. The splits depend on the
weights alone, so no row's result depends on other rows.
"""

from __future__ import annotations

from typing import Final

from mosaic.registrar.operator import Dim, require

FEW_ROWS: Final = 64
"""Most rows per launch: more rows are several launches."""
COLUMNS: Final = 64
"""Columns of the product, rows of the weight, in a tile."""
MOST_SPLITS: Final = 4
SPLIT_INNER: Final = 512
"""Fewest inputs of a split."""


def tile_count(*columns: Dim) -> int:
    """Count the tiles of products, one for each number of columns.

    >>> tile_count(4096, 1024, 1024), tile_count(100)
    (96, 2)
    """
    return sum(-(-int(count) // COLUMNS) for count in columns)


def split_count(tiles: int, inner: Dim, programs: int) -> int:
    """Count the splits of each tile over `inner` inputs, if about `programs` programs fill a GPU.

    >>> split_count(96, 4096, 384), split_count(64, 12288, 160), split_count(296, 3584, 160), split_count(1, 1100, 160)
    (4, 2, 1, 2)
    """
    return max(1, min(programs // tiles, int(inner) // SPLIT_INNER, MOST_SPLITS))


def partial_floats(tiles: int, splits: int) -> int:
    """Count the float32 values that splits write: a sum for every row and column, and a sum of squares for every row.

    >>> partial_floats(96, 2) == 96 * 2 * 64 * (64 + 1), partial_floats(300, 1)
    (True, 0)
    """
    return tiles * splits * FEW_ROWS * (COLUMNS + 1) if splits > 1 else 0


def require_arrivals(arrivals: Dim, tiles: int) -> None:
    """Refuse too few counters."""
    require(bool(arrivals >= tiles), f"arrivals must be int32[{tiles}] at least, not int32[{arrivals}]")
