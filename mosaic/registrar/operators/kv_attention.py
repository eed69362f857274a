"""y[T, N*H] = softmax(q k^T * scale) v per sequence and head, over keys and values kept in rows of kv[R, L*2*W].

Key j of sequence b lies in row `key_slots[cu_keys[b] + j]` of kv and has position j; `kv_store` says how a row is laid
out. A query sees every key of its sequence, or with `block` those of its own block of positions and of the blocks before:
at position p the keys j < (p // block + 1) * block. The window's own keys are among them: they are stored first. Queries
and their positions may be sliced by a region of tokens, the rest never; y may overwrite q; a row in no sequence, and one
that sees no key, is left as it was. `span` is the number of keys that a query sees on average, rounded up.
"""

from __future__ import annotations

from typing import Final

from mosaic.registrar.dtypes import ITEMSIZE
from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, exact, require
from mosaic.registrar.operators.kv_store import require_layer
from mosaic.registrar.tiles import KEY_ROWS, QUERY_ROWS, Tile, Tiled, Tiles, attention_tiles, compute_dtype


def infer(
    q: Spec, kv: Spec, key_slots: Spec, cu_seqlens: Spec, cu_keys: Spec, positions: Spec,
    *, layer: int, kv_heads: int, head_size: int, scale: float, span: Dim, block: int = 0,
) -> tuple[Spec]:  # fmt: skip
    width = kv_heads * head_size
    columns = exact(q.shape[-1])
    require(
        len(q.shape) == 2 and bool(columns.is_Integer) and columns % width == 0,
        f"q must have all heads of {head_size} for {kv_heads} KV heads, it has {columns} columns",
    )
    require(kv.dtype == q.dtype, f"kv must be {q.dtype} as q is, not {kv.dtype}")
    require_layer(kv, layer, width)
    require(len(key_slots.shape) == 1 and key_slots.dtype == "int64", f"key_slots must be int64[keys], not {key_slots}")
    require(
        len(cu_seqlens.shape) == 1 and cu_seqlens.dtype == "int32" and cu_keys == cu_seqlens,
        f"cu_seqlens and cu_keys must be int32[sequences + 1], not {cu_seqlens} and {cu_keys}",
    )
    require(positions == Spec(q.shape[:1], "int32"), f"positions must be int32[{q.shape[0]}], not {positions}")
    require(block >= 0, f"block must be a number of positions, or 0 for none, not {block}")
    return (q,)


def flops(q: Spec, *, span: Dim, **_: object) -> Dim:
    return 4 * span * q.elements


def bytes_moved(specs: Specs, attrs: Attrs) -> Dim:
    """Count every key's row once, and only this layer's columns of it."""
    columns = 2 * attrs["kv_heads"] * attrs["head_size"]
    rows = specs["key_slots"].elements * columns * ITEMSIZE[specs["kv"].dtype]
    return rows + sum(spec.bytes for name, spec in specs.items() if name != "kv")


def query_rows_and_heads(q: Spec, *, head_size: int, **_: object) -> Dim:
    """Return the launch's query rows times heads, which its rate goes by: they fill a GPU."""
    return q.shape[0] * (exact(q.shape[-1]) / head_size)


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List the tiles: queries of a group of heads side by side, gathered keys and values; 16-bit inputs are converted."""
    size, dtype = attrs["head_size"], specs["q"].dtype
    compute = compute_dtype(dtype)
    gathered = (Tile((KEY_ROWS, size), dtype),) if compute != dtype else ()
    own = attention_tiles(size, compute, attrs.get("block", 0))
    return Tile((QUERY_ROWS, size), compute), *(Tile((KEY_ROWS, size), compute),) * 2, *gathered, *own


KV_PARTIAL_ROWS: Final = 160 * 128
"""Most rows in the tiles of all programs together where attention over kept keys is split over them."""
KV_SPLIT_KEYS: Final = 256
"""Least keys that are worth a program of their own."""


def partials(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve partial results of tiles that are split over keys, whatever the batch: a float32 row, its maximum and its sum."""
    return int(4 * KV_PARTIAL_ROWS * (attrs["head_size"] + 2))


def kv_splits(tiles: int, tile_rows: int, keys: int, places: int) -> int:
    """Count the splits over keys for `tiles` tiles of rows (of all heads), on a GPU with places for `places` programs.

    The count depends on shapes alone, so that a captured launch serves other lengths. It is 1 where the tiles fill the GPU.

    >>> [kv_splits(tiles, 64, 8192, 264) for tiles in (1, 8, 32, 200, 2048)]
    [32, 32, 8, 1, 1]
    """
    most = min(places // tiles, KV_PARTIAL_ROWS // (tiles * tile_rows), -(-keys // KV_SPLIT_KEYS))
    return max(1, most)


OPERATOR = Operator(
    name="kv_attention",
    reads=("q", "kv", "key_slots", "cu_seqlens", "cu_keys", "positions"),
    writes=("y",),
    whole=frozenset({"kv", "key_slots", "cu_seqlens", "cu_keys"}),
    inplace=(("y", "q"),),
    infer=infer,
    flops=flops,
    bytes_moved=bytes_moved,
    rate="attention",
    rate_rows=query_rows_and_heads,
    implementations=(
        Implementation(
            name="cpu", backend="cpu", kernel="mosaic.kernels.kv_attention", scratch=Tiled(tiles), row_origin="q"
        ),
        Implementation(
            name="triton", backend="cuda", kernel="mosaic.kernels.cuda.kv_attention", scratch=partials, row_origin="q"
        ),
    ),
    roles={"q": "attention", "y": "attention"},
)
