"""y[T, N*H] = softmax(q k^T * scale) v per sequence and head, over selected keys of a prefix and all keys after it.

MAGE (arXiv 2602.14209, section 4, Phase 2 of Algorithm 1). Sequence b has captured[b] = P keys in its prefix and
seen[b] keys in all, including those of its window, which are stored first (`kv_store`). A query of set s attends to the
keys below P in the pages that row owner[b] of `selected` lists for s (`top_keys`), and to the keys from P to seen[b].
With `block` a query at position p sees only the keys j < (p // block + 1) * block among them. Sets are those of
`key_mass`, also per tile of `rows` rows: a query in tile t has the pages listed for s * tiles + t. With P = 0 this is
`kv_attention`, and no row of `selected` is read. A row in no sequence, or without a visible key, is unchanged. A region
of tokens may slice q, positions and y, nothing else. y may overwrite q.

`attended`, the mean number of keys that a query attends to, is for the cost model alone.
"""

from typing import Final

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Specs, require
from mosaic.registrar.operators.key_mass import require_sets, require_tiles
from mosaic.registrar.operators.kv_attention import tiles
from mosaic.registrar.operators.kv_store import KV, require_layer
from mosaic.registrar.operators.top_keys import require_selection
from mosaic.registrar.tiles import KEY_ROWS, Tile, Tiles


def rules(
    *, L: Dim, W: Dim, layer: int, slot: int, sets: int, k: int, page: int, kv_heads: int, block: int, rows: int, tiles: int,
    **_: object,
) -> None:  # fmt: skip
    require_layer("kv", L, layer)
    require_sets(kv_heads, sets)
    require(block >= 0, f"block must be a number of positions, or 0 for none, not {block}")
    require_tiles(block, rows, tiles)
    require_selection(W, slot, sets * tiles, k, page)


def gathered(specs: Specs, attrs: Attrs) -> Tiles:
    """List positions and places of selected keys, the gathered keys and values, and the tiles of `kv_attention`."""
    keys = Tile((2, KEY_ROWS, attrs["head_size"]), specs["q"].dtype)
    return Tile((attrs["k"],), "int64"), Tile((KEY_ROWS,), "int64"), keys, *tiles(specs, {**attrs, "block": 1})


SPLIT_ROWS: Final = 160 * 128
"""Most partial rows of all splits together."""
SPLIT_KEYS: Final = 128
"""Fewest keys of a split that has a program of its own."""


def partials(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve partial results of rows whose keys are split, for any batch: a float32 row, its maximum and its sum."""
    return int(4 * SPLIT_ROWS * (attrs["head_size"] + 2))


def splits_of(programs: int, rows: int, keys: int, places: int) -> int:
    """Count the splits over keys for `programs` programs and `rows` rows of all heads, on a GPU for `places` programs.

    A row attends to about `keys` keys. The count depends on shapes alone, so a captured launch serves other lengths.

    >>> [splits_of(programs, 1024, 1056, 264) for programs in (1, 32, 200)]
    [9, 8, 1]
    """
    return max(1, min(places // programs, SPLIT_ROWS // rows, -(-keys // SPLIT_KEYS)))


OPERATOR = Operator(
    name="selected_attention",
    operands=f"""
        q:a[T, M*sets*head_size] {KV} selected@#:i32[E, W] owner@:i64[B] captured@:i32[B] seen@:i32[B] cu_seqlens@:i32[B+1]
        positions:i32[T] -> y:a[T, M*sets*head_size]
    """,
    attrs="layer slot sets k page kv_heads head_size scale attended block=0 rows=0 tiles=1",
    inplace=(("y", "q"),),
    rules=rules,
    flops="4*attended*q",
    moved={"kv": "2*B*k*sets*tiles*head_size", "selected": "B*sets*tiles + B*sets*tiles*k/page"},
    rate="attention",
    rate_rows="T*M*sets",
    implementations=kernels_of(
        "selected_attention", tiles=gathered, scratch=partials, row_origin="q", invariant="selected_attention:launch_invariant"
    ),
    roles={"q": "attention", "y": "attention", "selected": "statistics"},
)  # fmt: skip
