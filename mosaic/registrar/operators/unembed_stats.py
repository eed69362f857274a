"""The statistics of `row_stats` for x[C, D] @ weight[V, D].T, kept online per vocabulary tile: logits never exist."""

from typing import Final

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Specs
from mosaic.registrar.operators.row_stats import STATISTICS, STATISTICS_OF_C
from mosaic.registrar.tiles import Tile, Tiles, statistics_tile, statistics_tiles


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    vocabulary, inner = specs["weight"].shape
    own = statistics_tiles(vocabulary)
    if specs["x"].dtype == "float32":
        return own
    rows, columns = statistics_tile(vocabulary)
    return (*own, Tile((rows, inner), "float32"), Tile((columns, inner), "float32"))


UNEMBED_ROWS: Final = 128
"""Most rows in one tile of the fused unembedding."""
UNEMBED_PROGRAMS: Final = 320
"""Most programs that the fused unembedding starts to fill a GPU: two per multiprocessor of the largest."""
UNEMBED_SPLITS: Final = 8
"""Most vocabulary splits of the fused unembedding once its rows fill the GPU; each keeps one partial per row."""
PARTIAL_BYTES: Final = 20
"""One partial of the statistics: an int32 token and four float32."""


def partials(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve partial statistics per row and vocabulary split, combined by a second launch.

    The bound is linear in rows. If there are more than `UNEMBED_SPLITS` splits (`unembed_splits`), there are at most
    `UNEMBED_PROGRAMS` programs of at most `UNEMBED_ROWS` rows each.
    """
    return partial_rows(specs["x"].shape[0]) * PARTIAL_BYTES


def partial_rows(rows: Dim) -> Dim:
    """Bound the partials of all rows and splits."""
    return rows * UNEMBED_SPLITS + UNEMBED_ROWS * UNEMBED_PROGRAMS


def unembed_splits(row_tiles: int, places: int) -> int:
    """Count the vocabulary splits for `row_tiles` tiles of rows on a GPU that runs `places` programs at a time.

    Few tiles need many splits to fill the GPU. For many tiles, the count is the one that leaves the fewest places idle
    in the last round, among those that let the programs of a round share operands in the cache.

    >>> [unembed_splits(tiles, 132) for tiles in (1, 16, 24, 128)]
    [132, 8, 5, 8]
    """
    places = min(places, UNEMBED_PROGRAMS)
    if places > UNEMBED_SPLITS * row_tiles:
        return places // row_tiles
    shared = range(UNEMBED_SPLITS // 2, UNEMBED_SPLITS + 1)
    return max(shared, key=lambda splits: (_filled(row_tiles * splits, places), splits))


def _filled(programs: int, places: int) -> float:
    return programs / (-(-programs // places) * places)


OPERATOR = Operator(
    name="unembed_stats",
    operands=f"x:a[C, D] weight:a[V, D] -> {STATISTICS_OF_C}",
    flops="2*x*V",
    rate="unembed",
    implementations=kernels_of("unembed_stats", tiles=tiles, scratch=partials, invariant=False),
    roles={**dict.fromkeys(STATISTICS, "statistics"), "x": "logits and head"},
)
