"""Scratch of the CPU implementations, torch-free.

`TILES[name]` lists the typed tiles that a kernel carves out of its scratch buffer, from the shapes of its operands;
`SCRATCH[name]` adds up their bytes. The kernels carve by the same lists, so the two cannot disagree. Dims that vary
with the batch, and widths that a region over heads slices, may be sympy expressions: they meet only `+`, `*`, constants
and a whole division by the head size; other sizes of the model (D, V, H, E, k) are plain integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

__all__ = [
    "COUNTERS",
    "COUNTER_COLUMNS",
    "GROUP_RUN",
    "ITEM_BYTES",
    "KEY_ROWS",
    "PRODUCT_TILE",
    "QUERY_ROWS",
    "ROW_NUMBERS",
    "SAMPLE_TILES",
    "SCORES",
    "SCRATCH",
    "TILES",
    "TILE_ALIGNMENT",
    "WHOLE_KEYS",
    "Tile",
    "compute_dtype",
    "linear_tiles",
]

ITEM_BYTES: Final[Mapping[str, int]] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "bool": 1,
}
TILE_ALIGNMENT: Final = 64  # bytes, a cache line; each tile may lose this much to alignment

# Sizes of tiles. Chosen so that the tiles an op works on together stay within about 1 to 4 MiB (an L2 cache of
# today).
SCORES: Final = 1 << 18
"""Scores in a tile of attention, however many rows and keys it has."""
QUERY_ROWS: Final = 512
KEY_ROWS: Final = 1024
WHOLE_KEYS: Final = 2048
"""Keys that a tile of scores may have where they are read in place: a softmax over all keys at once is the fastest."""
STATISTICS_ROWS: Final = 128
VOCABULARY_COLUMNS: Final = 1024
COUNTERS: Final = 32
"""Counters in a row of random numbers; each gives four words, for columns so far apart."""
COUNTER_COLUMNS: Final = 4 * COUNTERS
GROUP_RUN: Final = 8
"""Neighbouring columns of a group of random numbers; it has four such runs, `COUNTERS` columns apart."""
ROUTE_ROWS: Final = 256
COMBINE_ROWS: Final = 128
SCORE_ROWS: Final = 1024
"""Rows whose scores, one number each, are made at a time."""
PRODUCT_TILE: Final = (256, 512, 256)
"""Rows, columns and inner width of a tile of a 16-bit product, at any width of the operands: in smaller tiles BLAS falls
behind, and the calls are noticed."""
# Whatever the width: a region over heads slices widths, so they may be symbolic too (1 and 2 MiB of float32 at 4,096).
TILE_ROWS: Final = 64
ROTARY_ROWS: Final = 128

Shapes = Mapping[str, Sequence[Any]]  # operand -> dims; a dim is an int or a sympy expression
Dtypes = Mapping[str, str]
Attrs = Mapping[str, Any]


class Tile(NamedTuple):
    """A typed piece of scratch; `shape` may be symbolic in batch dims."""

    shape: tuple[Any, ...]
    dtype: str


TileFunction = Callable[[Shapes, Dtypes, Attrs], tuple[Tile, ...]]


def compute_dtype(dtype: str) -> str:
    """Give the dtype that an op on `dtype` computes in: float32, and float64 for float64.

    >>> compute_dtype("bfloat16")
    'float32'
    """
    return "float64" if dtype == "float64" else "float32"


def _statistics_tile(vocabulary: int) -> tuple[int, int]:
    """Rows and vocabulary columns of one tile of logits."""
    return STATISTICS_ROWS, min(VOCABULARY_COLUMNS, vocabulary)


def linear_tiles(dtype: str) -> tuple[Tile, ...]:
    """List the tiles of x @ weight.T: for a part of x, one of the weight and their product, 1.25 MiB at any width.

    None in float32 and float64, where BLAS reads the operands in place. PyTorch's 16-bit products on a CPU go through
    oneDNN, which asks PyTorch's allocator for a scratchpad; so 16-bit operands are converted here, tile by tile, and
    multiplied in float32.
    """
    if compute_dtype(dtype) == dtype:
        return ()
    rows, columns, inner = PRODUCT_TILE
    return Tile((rows * inner,), "float32"), Tile((columns * inner,), "float32"), Tile((rows * columns,), "float32")


def _linear(shapes: Shapes, dtypes: Dtypes, attrs: Attrs) -> tuple[Tile, ...]:
    return linear_tiles(dtypes["x"])


def _norm(rows: Any, heads: Any, width: int, dtype: str) -> tuple[Tile, ...]:
    compute = compute_dtype(dtype)
    epsilon = Tile((1,), compute)
    if compute == dtype:
        return epsilon, Tile((rows, heads, 1), compute)
    wide = Tile((TILE_ROWS, heads * width), compute)
    return epsilon, Tile((TILE_ROWS, heads, 1), compute), wide, Tile((width,), compute)


def _rms_norm(shapes: Shapes, dtypes: Dtypes, attrs: Attrs) -> tuple[Tile, ...]:
    rows, width = shapes["x"]
    return _norm(rows, 1, width, dtypes["x"])


def _head_norm(shapes: Shapes, dtypes: Dtypes, attrs: Attrs) -> tuple[Tile, ...]:
    (rows, columns), (size,) = shapes["x"], shapes["weight"]
    return _norm(rows, columns // size, size, dtypes["x"])


def _rotary(shapes: Shapes, dtypes: Dtypes, attrs: Attrs) -> tuple[Tile, ...]:
    heads, half = shapes["x"][1] // attrs["head_size"], shapes["inv_freq"][-1]
    rows, compute = ROTARY_ROWS, compute_dtype(dtypes["x"])
    angles = Tile((rows, half), "float32")
    halves = () if compute == dtypes["x"] else (Tile((rows, heads, 2 * half), compute),)
    table = () if compute == "float32" else (Tile((rows, half), compute), Tile((rows, half), compute))
    return Tile((rows, 1), "float32"), angles, angles, Tile((rows, heads, half), compute), *table, *halves


def _attention_tiles(head_size: int, dtype: str, block: int) -> tuple[Tile, ...]:
    """List the tiles of an online softmax: scores, accumulator, five vectors, and for blocks what masks the keys."""
    vector = Tile((QUERY_ROWS,), dtype)
    own = (Tile((SCORES,), dtype), Tile((QUERY_ROWS, head_size), dtype), *(vector,) * 5)
    if not block:
        return own
    return (*own, Tile((QUERY_ROWS,), "int64"), Tile((WHOLE_KEYS,), "int64"), Tile((SCORES,), "bool"))


def _attention(shapes: Shapes, dtypes: Dtypes, attrs: Attrs) -> tuple[Tile, ...]:
    """For 16-bit inputs query, key and value are converted."""
    size, compute = attrs["head_size"], compute_dtype(dtypes["q"])
    own = _attention_tiles(size, compute, attrs.get("block", 0))
    if compute == dtypes["q"]:
        return own
    return Tile((QUERY_ROWS, size), compute), *(Tile((KEY_ROWS, size), compute),) * 2, *own


def _kv_attention(shapes: Shapes, dtypes: Dtypes, attrs: Attrs) -> tuple[Tile, ...]:
    """Queries of a group of heads side by side, gathered keys and values; for 16-bit inputs these are then converted."""
    size, dtype = attrs["head_size"], dtypes["q"]
    compute = compute_dtype(dtype)
    gathered = (Tile((KEY_ROWS, size), dtype),) if compute != dtype else ()
    own = _attention_tiles(size, compute, attrs.get("block", 0))
    return Tile((QUERY_ROWS, size), compute), *(Tile((KEY_ROWS, size), compute),) * 2, *gathered, *own


def _shift_rows(shapes: Shapes, dtypes: Dtypes, attrs: Attrs) -> tuple[Tile, ...]:
    (rows,), (bounds,) = shapes["rows"], shapes["cu_seqlens"]
    return Tile((1,), "int64"), Tile((bounds,), "int64"), Tile((rows,), "int64"), Tile((rows,), "int64")


def _statistics(vocabulary: int) -> tuple[Tile, ...]:
    rows, columns = _statistics_tile(vocabulary)
    vector = Tile((rows,), "float32")
    tile = Tile((rows, columns), "float32")
    return tile, tile, *(vector,) * 6, Tile((rows,), "int64"), Tile((rows,), "bool"), Tile((1,), "int64")


def _row_stats(shapes: Shapes, dtypes: Dtypes, attrs: Attrs) -> tuple[Tile, ...]:
    return _statistics(shapes["logits"][1])


def _unembed_stats(shapes: Shapes, dtypes: Dtypes, attrs: Attrs) -> tuple[Tile, ...]:
    vocabulary, inner = shapes["weight"]
    own = _statistics(vocabulary)
    if dtypes["x"] == "float32":
        return own
    rows, columns = _statistics_tile(vocabulary)
    return (*own, Tile((rows, inner), "float32"), Tile((columns, inner), "float32"))


def _samples(rows: Any, vocabulary: int) -> tuple[Tile, ...]:
    """List what sampling needs besides: a score for every row, and tiles for the random numbers of a tile of logits."""
    tile_rows, columns = _statistics_tile(vocabulary)
    blocks = -(-columns // COUNTER_COLUMNS)
    vector, index = Tile((tile_rows,), "float32"), Tile((tile_rows,), "int64")
    numbers = Tile((tile_rows, blocks * COUNTER_COLUMNS), "float32")
    groups = Tile((tile_rows, blocks * COUNTERS // GROUP_RUN), "float32")
    words = (Tile((tile_rows, blocks * COUNTERS), "int64"),) * 6
    state = vector, vector, index, Tile((tile_rows,), "bool"), Tile((1,), "int64"), numbers
    constants = Tile((10,), "int64"), Tile((5,), "float32")
    return Tile((rows,), "float32"), *state, *constants, index, index, groups, groups, numbers, *words


def _row_sample(shapes: Shapes, dtypes: Dtypes, attrs: Attrs) -> tuple[Tile, ...]:
    rows, vocabulary = shapes["logits"]
    return *_row_stats(shapes, dtypes, attrs), *_samples(rows, vocabulary)


def _unembed_sample(shapes: Shapes, dtypes: Dtypes, attrs: Attrs) -> tuple[Tile, ...]:
    return *_unembed_stats(shapes, dtypes, attrs), *_samples(shapes["x"][0], shapes["weight"][0])


def _moe_route(shapes: Shapes, dtypes: Dtypes, attrs: Attrs) -> tuple[Tile, ...]:
    experts, inner = shapes["weight"]
    compute, rows = compute_dtype(dtypes["x"]), ROUTE_ROWS
    own: tuple[Tile, ...] = (
        Tile((rows, experts), compute),
        Tile((rows,), compute),
        Tile((rows,), "int64"),
        Tile((rows, attrs["top_k"]), compute),
    )
    if "bias" in shapes or attrs.get("groups"):
        own = (*own, Tile((rows, experts), compute))
    if groups := attrs.get("groups"):
        best = Tile((rows, groups), compute)
        own = (*own, best, best, Tile((rows, groups), "int64"))
    if compute == dtypes["x"]:
        return own
    return (*own, Tile((rows, inner), compute), Tile((experts, inner), compute))


def _moe_sort(shapes: Shapes, dtypes: Dtypes, attrs: Attrs) -> tuple[Tile, ...]:
    tokens, top_k = shapes["experts"]
    return Tile((2,), "int64"), Tile((tokens * top_k,), "int64")


def _moe_gather(shapes: Shapes, dtypes: Dtypes, attrs: Attrs) -> tuple[Tile, ...]:
    return Tile((1,), "int64"), Tile((shapes["order"][0],), "int64")


def _moe_combine(shapes: Shapes, dtypes: Dtypes, attrs: Attrs) -> tuple[Tile, ...]:
    (assignments,), (_, width), compute = shapes["order"], shapes["x"], compute_dtype(dtypes["x"])
    indices = Tile((assignments,), "int64")
    rows = Tile((COMBINE_ROWS, width), dtypes["x"])
    own = (indices, indices, Tile((COMBINE_ROWS,), "int64"), rows)
    if compute == dtypes["x"]:
        return own
    wide = Tile((COMBINE_ROWS, width), compute)
    return (*own, wide, wide, Tile((COMBINE_ROWS,), compute))


ROW_NUMBERS: Final = (Tile((10,), "int64"), Tile((5,), "float32"), *(Tile((SCORE_ROWS,), "int64"),) * 8)
"""What a random number of each row takes: constants, then integers of some rows."""


def _row_score(shapes: Shapes, dtypes: Dtypes, attrs: Attrs) -> tuple[Tile, ...]:
    if attrs["kind"] == "random":
        return ROW_NUMBERS
    return (Tile((SCORE_ROWS,), "float32"),) if attrs["kind"] == "margin" else ()


def _perturb_score(shapes: Shapes, dtypes: Dtypes, attrs: Attrs) -> tuple[Tile, ...]:
    return Tile((SCORE_ROWS,), "float32"), *ROW_NUMBERS


def _guide(shapes: Shapes, dtypes: Dtypes, attrs: Attrs) -> tuple[Tile, ...]:
    (_, width), compute = shapes["x"], compute_dtype(dtypes["x"])
    constants = Tile((2,), compute)
    return (constants,) if compute == dtypes["x"] else (constants, *(Tile((TILE_ROWS, width), compute),) * 2)


def _row_nucleus(shapes: Shapes, dtypes: Dtypes, attrs: Attrs) -> tuple[Tile, ...]:
    """List a row of logits, its order, its weights, their sums, and the random numbers of a row at once."""
    vocabulary = shapes["logits"][1]
    blocks = -(-vocabulary // COUNTER_COLUMNS)
    numbers, groups = Tile((1, blocks * COUNTER_COLUMNS), "float32"), Tile((blocks * COUNTERS // GROUP_RUN,), "float32")
    row, index = Tile((vocabulary,), "float32"), Tile((1,), "int64")
    own = row, Tile((vocabulary,), "int64"), row, Tile((vocabulary,), "float64"), Tile((2,), "float32"), numbers
    constants = Tile((10,), "int64"), Tile((5,), "float32")
    return *own, *constants, index, index, groups, groups, numbers, *(Tile((blocks * COUNTERS,), "int64"),) * 6


def _transfer(shapes: Shapes, dtypes: Dtypes, attrs: Attrs) -> tuple[Tile, ...]:
    rows = shapes["score"][0]
    return (Tile((rows,), "int64"), Tile((rows,), "float32"), Tile((rows,), "int32"), *(Tile((rows,), "bool"),) * 2)


SAMPLE_TILES: Final = len(_samples(1, 1))
"""How many tiles come last in the scratch of a kernel that samples."""

TILES: Final[Mapping[str, TileFunction]] = {
    "attention": _attention,
    "grouped_linear": _linear,
    "guide": _guide,
    "head_norm": _head_norm,
    "kv_attention": _kv_attention,
    "linear": _linear,
    "linear_add": _linear,
    "moe_combine": _moe_combine,
    "moe_gather": _moe_gather,
    "moe_route": _moe_route,
    "moe_sort": _moe_sort,
    "perturb_score": _perturb_score,
    "rms_norm": _rms_norm,
    "rotary": _rotary,
    "row_nucleus": _row_nucleus,
    "row_sample": _row_sample,
    "row_score": _row_score,
    "row_stats": _row_stats,
    "shift_rows": _shift_rows,
    "transfer": _transfer,
    "unembed_sample": _unembed_sample,
    "unembed_stats": _unembed_stats,
}


def tiles_bytes(tiles: Sequence[Tile]) -> Any:
    """Add up tiles, each with room for its alignment; an int, or an expression in symbolic dims; 0 for no tiles.

    >>> tiles_bytes([Tile((3,), "float32")])
    76
    """
    return sum((math.prod(tile.shape) * ITEM_BYTES[tile.dtype] + TILE_ALIGNMENT for tile in tiles), start=0)


def _bytes_of(tiles: TileFunction) -> Callable[[Shapes, Dtypes, Attrs], Any]:
    return lambda shapes, dtypes, attrs: tiles_bytes(tiles(shapes, dtypes, attrs))


SCRATCH: Final[Mapping[str, Callable[[Shapes, Dtypes, Attrs], Any]]] = {
    name: _bytes_of(function) for name, function in TILES.items()
}
"""Scratch bytes per contract: (shapes, dtypes, attrs) by operand name -> bytes; 0: no scratch buffer is needed."""
