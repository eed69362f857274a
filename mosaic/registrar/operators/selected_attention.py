"""y[T, N*H] = softmax(q k^T * scale) v per sequence and head, over selected keys of a prefix and all keys after it.

MAGE (arXiv 2602.14209, section 4, Phase 2 of Algorithm 1). Sequence b has captured[b] = P keys in its prefix and seen[b] keys in
all, its window's own among them: they are stored first (`kv_store`). A query of set s attends to the keys below P of the pages
that row owner[b] of `selected` lists for s (`top_keys` says how), and to the keys from P to seen[b]. With `block` a query at
position p sees, of these, the keys j < (p // block + 1) * block. Sets are those of `key_mass`, also of `tiles` of `rows` rows: a
query in tile t has the keys that are listed for s * tiles + t. With P = 0 this is `kv_attention`, and no row of `selected` is read.
A row in no sequence, or that sees no key, is left as it was. q, positions and y may be sliced by a region of tokens, the rest
never. y may overwrite q.

`attended`, the mean number of keys that a query attends to, is for the cost model alone.
"""

from __future__ import annotations

from typing import Final

from mosaic.registrar.dtypes import ITEMSIZE
from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, exact, require
from mosaic.registrar.operators.key_mass import require_sets, require_tiles
from mosaic.registrar.operators.kv_attention import tiles
from mosaic.registrar.operators.kv_store import require_extents, require_layer
from mosaic.registrar.operators.top_keys import numbers_of, require_selection
from mosaic.registrar.tiles import KEY_ROWS, Tile, Tiled, Tiles


def infer(
    q: Spec, kv: Spec, extents: Spec, cu_extents: Spec, selected: Spec, owner: Spec, captured: Spec, seen: Spec,
    cu_seqlens: Spec, positions: Spec,
    *, layer: int, slot: int, sets: int, k: int, page: int, kv_heads: int, head_size: int, scale: float, attended: Dim,
    block: int = 0, rows: int = 0, tiles: int = 1,
) -> tuple[Spec]:  # fmt: skip
    require(kv.dtype == q.dtype, f"kv must be {q.dtype} as q is, not {kv.dtype}")
    require_sets(q, kv_heads, head_size, sets)
    require_layer(kv, layer, kv_heads * head_size)
    require_extents(extents, cu_extents, cu_seqlens)
    require_tiles(q, positions if rows else None, block, rows, tiles)
    require_selection(selected, owner, captured, cu_seqlens.shape[0] - 1, slot, sets * tiles, k, page)
    require(seen == captured, f"seen must be {captured} as captured is, not {seen}")
    require(positions == Spec(q.shape[:1], "int32"), f"positions must be int32[{q.shape[0]}], not {positions}")
    require(block >= 0, f"block must be a number of positions, or 0 for none, not {block}")
    return (q,)


def flops(q: Spec, *, attended: Dim, **_: object) -> Dim:
    return 4 * attended * q.elements


def bytes_moved(specs: Specs, attrs: Attrs) -> Dim:
    """Count, of each sequence, tile and set, k keys and values and the selection; keys after a prefix are few, and just stored."""
    sequences, sets = specs["owner"].shape[0], attrs["sets"] * attrs.get("tiles", 1)
    chosen = sequences * attrs["k"] * 2 * sets * attrs["head_size"] * ITEMSIZE[specs["kv"].dtype]
    numbers = 4 * sequences * sets * numbers_of(attrs["k"], attrs["page"])
    return chosen + numbers + sum(spec.bytes for name, spec in specs.items() if name not in ("kv", "selected"))


def gathered(specs: Specs, attrs: Attrs) -> Tiles:
    """List positions of selected keys, their places, what is gathered there, and the tiles of `kv_attention` in blocks."""
    keys = Tile((2, KEY_ROWS, attrs["head_size"]), specs["q"].dtype)
    return Tile((attrs["k"],), "int64"), Tile((KEY_ROWS,), "int64"), keys, *tiles(specs, {**attrs, "block": 1})


SPLIT_ROWS: Final = 160 * 128
"""Most partial rows of all splits together."""
SPLIT_KEYS: Final = 128
"""Least keys that are worth a program of their own."""


def partials(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve partial results of rows whose keys are split, whatever the batch: a float32 row, its maximum and its sum."""
    return int(4 * SPLIT_ROWS * (attrs["head_size"] + 2))


def splits_of(programs: int, rows: int, keys: int, places: int) -> int:
    """Count the splits over keys for `programs` programs and `rows` rows of all heads, on a GPU with places for `places`.

    A row attends to about `keys` keys. The count depends on shapes alone, so that a captured launch serves other lengths.

    >>> [splits_of(programs, 1024, 1056, 264) for programs in (1, 32, 200)]
    [9, 8, 1]
    """
    return max(1, min(places // programs, SPLIT_ROWS // rows, -(-keys // SPLIT_KEYS)))


OPERATOR = Operator(
    name="selected_attention",
    reads=(
        "q", "kv", "extents", "cu_extents", "selected", "owner", "captured", "seen", "cu_seqlens", "positions",
    ),
    writes=("y",),
    whole=frozenset({"kv", "extents", "cu_extents", "selected", "owner", "captured", "seen", "cu_seqlens"}),
    inplace=(("y", "q"),),
    infer=infer,
    flops=flops,
    bytes_moved=bytes_moved,
    rate="attention",
    rate_rows=lambda q, *, head_size, **_: q.shape[0] * (exact(q.shape[-1]) / head_size),
    implementations=(
        Implementation(
            name="cpu", backend="cpu", kernel="mosaic.kernels.selected_attention", scratch=Tiled(gathered), row_origin="q"
        ),
        Implementation(
            name="triton", backend="cuda", kernel="mosaic.kernels.cuda.selected_attention", scratch=partials, row_origin="q"
        ),
        Implementation(
            name="invariant",
            backend="cuda",
            kernel="mosaic.kernels.cuda.selected_attention:launch_invariant",
            row_origin="q",
            invariant=True,
            on_request=True,
        ),
    ),
    roles={"q": "attention", "y": "attention", "selected": "statistics"},
)  # fmt: skip
