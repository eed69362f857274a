"""Typed tiles that CPU kernels carve out of their scratch, and sizes and lists of tiles that several operators share.

An operator's file lists its tiles from the specs of its operands. `Tiled` adds up their bytes for the plan, and the
kernel carves by the same list, so the two agree. Dims that vary with the batch, and widths that a region over heads
slices, may be polynomials: they are combined only by `+`, `*`, constants and an exact division by the head size. Other
sizes of the model (D, V, H, E, k) are plain integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from mosaic.registrar.dtypes import ITEMSIZE
from mosaic.registrar.operator import Attrs, Dim, Specs

TILE_ALIGNMENT: Final = 64  # bytes, a cache line; each tile may lose this much to alignment

# Sizes of tiles. The tiles that an op uses together take about 1 to 4 MiB (a typical L2 cache).
SCORES: Final = 1 << 18
"""Scores in a tile of attention, however many rows and keys it has."""
QUERY_ROWS: Final = 512
KEY_ROWS: Final = 1024
WHOLE_KEYS: Final = 2048
"""Keys in a tile of scores if they are read in place: a softmax over all keys at once is the fastest."""
STATISTICS_ROWS: Final = 128
VOCABULARY_COLUMNS: Final = 1024
COUNTERS: Final = 32
"""Counters in a row of random numbers; each gives four words, for columns that are `COUNTERS` apart."""
COUNTER_COLUMNS: Final = 4 * COUNTERS
GROUP_RUN: Final = 8
"""Neighbouring columns of a group of random numbers; it has four such runs, `COUNTERS` columns apart."""
SCORE_ROWS: Final = 1024
"""Rows whose scores, one number each, are computed at a time."""
PRODUCT_TILE: Final = (256, 512, 256)
"""Rows, columns and inner width of a tile of a 16-bit product, at any width of the operands: with smaller tiles BLAS is
slower and the number of calls shows."""
TILE_ROWS: Final = 64
"""Rows of a tile of norms, whatever the width, which a region over heads may make symbolic: 1 MiB of float32 at 4,096."""


class Tile(NamedTuple):
    """A typed piece of scratch; `shape` may be symbolic in batch dims."""

    shape: tuple[Any, ...]
    dtype: str


Tiles: TypeAlias = tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Tiled:
    """Scratch bytes of a kernel that carves tiles: called as an implementation's `scratch`.

    Parameters
    ----------
    tiles
        Lists the tiles of one launch, from the specs of its operands and its attributes.
    """

    tiles: Callable[[Specs, Attrs], Tiles]

    def __call__(self, specs: Specs, attrs: Attrs) -> Dim:
        """Add up the bytes of the tiles of one launch."""
        return tiles_bytes(self.tiles(specs, attrs))


def tiles_bytes(tiles: Sequence[Tile]) -> Dim:
    """Add up tiles, each with room for its alignment; an int, or an expression in symbolic dims; 0 for no tiles.

    >>> tiles_bytes([Tile((3,), "float32")])
    76
    """
    return sum((math.prod(tile.shape) * ITEMSIZE[tile.dtype] + TILE_ALIGNMENT for tile in tiles), start=0)


def compute_dtype(dtype: str) -> str:
    """Give the dtype that an op on `dtype` computes in: float32, and float64 for float64.

    >>> compute_dtype("bfloat16")
    'float32'
    """
    return "float64" if dtype == "float64" else "float32"


def linear_tiles(dtype: str) -> Tiles:
    """List the tiles of x @ weight.T: for a part of x, one of the weight and their product, 1.25 MiB at any width.

    None in float32 and float64, where BLAS reads the operands in place. PyTorch's 16-bit products on a CPU go through
    oneDNN, which asks PyTorch's allocator for a scratchpad; so 16-bit operands are converted here, tile by tile, and
    multiplied in float32.
    """
    if compute_dtype(dtype) == dtype:
        return ()
    rows, columns, inner = PRODUCT_TILE
    return Tile((rows * inner,), "float32"), Tile((columns * inner,), "float32"), Tile((rows * columns,), "float32")


def norm_tiles(rows: Dim, heads: Dim, width: Dim, dtype: str) -> Tiles:
    """List the tiles of a norm of `heads` parts of `width` columns in each of `rows` rows."""
    compute = compute_dtype(dtype)
    epsilon = Tile((1,), compute)
    if compute == dtype:
        return epsilon, Tile((rows, heads, 1), compute)
    wide = Tile((TILE_ROWS, heads * width), compute)
    return epsilon, Tile((TILE_ROWS, heads, 1), compute), wide, Tile((width,), compute)


def attention_tiles(head_size: int, dtype: str, *, masked: bool) -> Tiles:
    """List the tiles of an online softmax: scores, accumulator, five vectors, and a mask of keys."""
    vector = Tile((QUERY_ROWS,), dtype)
    own = (Tile((SCORES,), dtype), Tile((QUERY_ROWS, head_size), dtype), *(vector,) * 5)
    if not masked:
        return own
    return (*own, Tile((QUERY_ROWS,), "int64"), Tile((WHOLE_KEYS,), "int64"), Tile((SCORES,), "bool"))


def statistics_tile(vocabulary: int) -> tuple[int, int]:
    """Return rows and vocabulary columns of one tile of logits."""
    return STATISTICS_ROWS, min(VOCABULARY_COLUMNS, vocabulary)


def statistics_tiles(vocabulary: int) -> Tiles:
    """List the tiles of statistics of rows of logits."""
    rows, columns = statistics_tile(vocabulary)
    vector = Tile((rows,), "float32")
    tile = Tile((rows, columns), "float32")
    return tile, tile, *(vector,) * 6, Tile((rows,), "int64"), Tile((rows,), "bool"), Tile((1,), "int64")


def sample_tiles(rows: Dim, vocabulary: int) -> Tiles:
    """List the extra tiles of sampling: a score for every row, and the random numbers of a tile of logits."""
    tile_rows, columns = statistics_tile(vocabulary)
    blocks = -(-columns // COUNTER_COLUMNS)
    vector, index = Tile((tile_rows,), "float32"), Tile((tile_rows,), "int64")
    numbers = Tile((tile_rows, blocks * COUNTER_COLUMNS), "float32")
    groups = Tile((tile_rows, blocks * COUNTERS // GROUP_RUN), "float32")
    words = (Tile((tile_rows, blocks * COUNTERS), "int64"),) * 6
    state = vector, vector, index, Tile((tile_rows,), "bool"), Tile((1,), "int64"), numbers
    constants = Tile((10,), "int64"), Tile((5,), "float32")
    return Tile((rows,), "float32"), *state, *constants, index, index, groups, groups, numbers, *words


SAMPLE_TILES: Final = len(sample_tiles(1, 1))
"""The number of tiles at the end of a sampling kernel's scratch."""

ROW_NUMBERS: Final = (Tile((10,), "int64"), Tile((5,), "float32"), *(Tile((SCORE_ROWS,), "int64"),) * 8)
"""The tiles of one random number per row: constants, then integers of some rows."""
