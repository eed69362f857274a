"""Tiles of the fused unembedding: which one, loaded how, and where a narrow one ends every split of the vocabulary."""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import Tile, tile_for
from mosaic.registrar.operators.unembed_stats import UNEMBED_ROWS

# Tiles by item size, for many rows and for few, without and with samples. What bounds the product of many rows seems to
# be how fast tiles come from the L2 cache, 1 / rows + 1 / columns bytes per FLOP: on an H200 (D 4,096, V 126,464,
# bfloat16, 2,048 rows) tiles of 128x128 took 4.6 ms and of 64x128 7.4, both 7 TB/s. So the largest tile that spills on
# no card; with descriptors, which need no registers for addresses, a larger one.
POINTER_TILES: Final = {
    False: {2: Tile(128, 128, 64, 8, 3), 4: Tile(64, 128, 32, 8, 2)},
    True: {2: Tile(64, 128, 32, 8, 4), 4: Tile(32, 128, 32, 8, 2)},
}
FEW_POINTER_TILES: Final = {
    False: {2: Tile(64, 128, 64, 8, 3), 4: Tile(64, 128, 32, 8, 2)},
    True: POINTER_TILES[True],
}
# Of eight tiles with descriptors on an H200, for the statistics: 2,048 rows in 128x256x64, loops flattened, took 2.66 ms,
# 0.97 of cuBLAS's bare product (3.37 with the loops apart); 32 rows in 64x256x64 took 0.26 ms, 1.03 of it. One tile of rows
# waits for the weight alone: a fourth stage took 0.96 of the time of three at 128 rows, and 1.07 of it at 2,048.
DESCRIPTOR_TILES: Final = {False: Tile(128, 256, 64, 8, 3), True: Tile(128, 128, 64, 8, 3)}
SINGLE_DESCRIPTOR_TILES: Final = {False: Tile(128, 256, 64, 8, 4), True: DESCRIPTOR_TILES[True]}
FEW_DESCRIPTOR_TILES: Final = {False: Tile(64, 256, 64, 8, 4), True: Tile(64, 128, 64, 8, 4)}
FEW_ROWS: Final = 64


def tile_of(x: Tensor, sampled: bool, described: bool) -> Tile:
    """Choose the tile for the rows of `x`."""
    few = x.shape[0] <= FEW_ROWS
    if not described:
        return tile_for((FEW_POINTER_TILES if few else POINTER_TILES)[sampled], x)
    if few:
        return FEW_DESCRIPTOR_TILES[sampled]
    return (SINGLE_DESCRIPTOR_TILES if x.shape[0] <= UNEMBED_ROWS else DESCRIPTOR_TILES)[sampled]


def narrow_columns(tiles: int, splits: int, vocabulary: int, columns: int) -> int:
    """Return the columns of a last tile of every split, half as wide, where those cover what whole rounds leave; else 0.

    256 rows on 132 processors are 66 splits of 494 tiles: seven each, and eight for some, for which all would wait. There
    are no more splits than tiles, so every split has a whole tile before its narrow one, which may lie past the end.

    >>> narrow_columns(494, 66, 126464, 256), narrow_columns(494, 132, 126464, 256), narrow_columns(494, 33, 126464, 256)
    (128, 0, 0)
    """
    rest = vocabulary - tiles // splits * splits * columns
    return columns // 2 if 0 < rest <= splits * (columns // 2) else 0
