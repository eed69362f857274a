"""y[T, N*H] = softmax(q k^T * scale) v per sequence and head, over keys and values kept in rows of kv[R, L*2*W].

kv may have a dtype of its own. `kv_store` describes the layout: the key of a position lies in one of its sequence's
extents. Sequence b sees its first `seen[b]` keys, including those of its window, which are stored first. With `block`
a query sees the keys of its own block of positions and of earlier blocks: at position p the keys j < (p // block + 1)
* block. With `sees[T, 2]` row r sees the keys at positions in [sees[r, 0], sees[r, 1]), at least one, and `block` does
not apply. A region of tokens may slice queries and their positions, nothing else. y may overwrite q. A row in no
sequence, or without a visible key, is unchanged. For the cost model alone: `span`, the mean number of keys that a
query sees, rounded up, and `keys`, the number that all sequences see together. `parts` is the room for rows of partial
results, per query head (`kv_parts`): with 1, a GPU processes all keys of a tile of queries in one program, as it has
to if a sequence sees more keys than kv has rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Spec, Specs, exact, require
from mosaic.registrar.operators import kv_store
from mosaic.registrar.operators.attention import require_sees
from mosaic.registrar.operators.kv_store import KV
from mosaic.registrar.tiles import KEY_ROWS, QUERY_ROWS, Tile, Tiles, attention_tiles, compute_dtype

QUERIES: Final = (
    f"q:a[T, G*kv_heads*head_size] {KV.replace(':a', ':c', 1)} seen@:i32[B] cu_seqlens@:i32[B+1] positions:i32[T]"
)
ATTRS: Final = "layer kv_heads head_size scale span keys block=0 parts=1"
SEEN: Final = {"kv": "2*keys*kv_heads*head_size"}
"""Every visible key counts once, and only this layer's part of its row."""


def rules(
    *, G: Dim, L: Dim, layer: int, scale: float, block: int, kv: Spec, sees: Spec | None = None, **_: object
) -> None:
    require(isinstance(G, int), "q must have all heads, whichever loops slice it")
    kv_store.rules(L=L, layer=layer, kv=kv)
    require(scale > 0, f"scale must be positive, not {scale}")
    require(block >= 0, f"block must be a number of positions, or 0 for none, not {block}")
    require_sees(sees, block)


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List the tiles: queries of a group of heads side by side; keys and values, converted from another dtype."""
    size, compute = attrs["head_size"], compute_dtype(specs["q"].dtype)
    converted = (Tile((KEY_ROWS, size), compute),) * 2 if compute != specs.get("kv", specs["q"]).dtype else ()
    own = attention_tiles(size, compute, masked=bool(attrs.get("block")) or "sees" in specs)
    return Tile((QUERY_ROWS, size), compute), *converted, *own


def with_sums(specs: Specs, attrs: Attrs) -> Tiles:
    """List the log-sum-exps of a tile of rows, and the tiles above as if with blocks."""
    return Tile((QUERY_ROWS,), compute_dtype(specs["q"].dtype)), *tiles(specs, {**attrs, "block": 1})


KV_SEGMENT_KEYS: Final = 1024
"""Fewest keys of a segment that has a program of its own."""
KV_SEGMENTS: Final = 16
"""Most segments that a sequence's keys are cut into."""
KV_SEGMENT_TOKENS: Final = 512
"""Most tokens of a window times its segments: with the query heads that share keys, enough programs to fill a GPU."""
KV_SPLIT_TOKENS: Final = 512
"""Most tokens of a step whose segments have programs of their own; with more, the windows fill a GPU."""


def kv_segments(window: int, keys: int) -> int:
    """Count the segments of the keys that a window of tokens sees; it depends on the request alone.

    The results of segments are joined in order, whether one program computes all of them or each has its own. So a
    request's result is bit for bit independent of the other requests of its step.

    >>> [kv_segments(32, keys) for keys in (1, 1024, 4096, 1 << 17)], kv_segments(64, 1 << 17), kv_segments(2048, 1 << 17)
    ([1, 1, 4, 16], 8, 1)
    """
    wanted = min(KV_SEGMENTS, max(KV_SEGMENT_TOKENS // window, 1), max(math.ceil(keys / KV_SEGMENT_KEYS), 1))
    share = math.ceil(math.ceil(keys / wanted) / KV_SEGMENT_ALIGNED) * KV_SEGMENT_ALIGNED
    return max(math.ceil(keys / max(share, 1)), 1)


KV_SEGMENT_ALIGNED: Final = 128
"""Segments end at multiples of this number of keys: whole tiles."""


def kv_parts(windows: Sequence[int], keys: Sequence[int]) -> int:
    """Bound the rows of partial results, per query head, of windows with these numbers of tokens and keys: `parts`.

    It is 1, the least value of a dim, if no segment has a program of its own.

    >>> kv_parts([32], [1 << 17]), kv_parts([32] * 3, [300, 4096, 9000]), kv_parts([32] * 17, [4096] * 17)
    (512, 416, 1)
    """
    if sum(windows) > KV_SPLIT_TOKENS:
        return 1
    split = [_parts(window, most) for window, most in zip(windows, keys, strict=True) if most > KV_SEGMENT_KEYS]
    return max(sum(split), 1)


def _parts(window: int, keys: int) -> int:
    return min(KV_SEGMENT_TOKENS, window * min(KV_SEGMENTS, -(-keys // KV_SEGMENT_KEYS)))


HOPPER: Final = 90
"""Compute capability of the cards with a kernel of their own: the copy engine brings tiles of keys, and warpgroups multiply."""


def whole_lines(specs: Specs, attrs: Attrs) -> bool:
    """Tell whether the copy engine can read a key of one head as a line of a matrix: 64 or 128 numbers of 16 bits."""
    return attrs["head_size"] in (64, 128) and specs["q"].dtype == specs["kv"].dtype == "bfloat16"


def segment_results(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve partial results of segments, per head: a float32 row, its maximum and its sum."""
    size = attrs["head_size"]
    return attrs.get("parts", 1) * (exact(specs["q"].shape[-1]) / size) * (size + 2) * 4


_CPU, *_PLAIN = kernels_of(
    "kv_attention", tiles=tiles, scratch=segment_results, row_origin="q", invariant="kv_attention:launch_invariant"
)
_NAMES: Final = {"triton": "hopper", "invariant": "hopper_invariant"}
_HOPPER: Final = [
    replace(
        way, name=_NAMES[way.name], kernel=way.kernel.replace("kv_attention", "kv_attention_hopper"), capability=HOPPER,
        serves=whole_lines,
    )
    for way in _PLAIN
]  # fmt: skip
ON_CUDA: Final = (*_HOPPER, *_PLAIN)
"""Those of `prefix_attention`, too: whatever writes a row of y has its maximum and its sum."""


OPERATOR = Operator(
    name="kv_attention",
    operands=f"{QUERIES} sees?:i32[T, 2] -> y:a[T, G*kv_heads*head_size]",
    attrs=ATTRS,
    inplace=(("y", "q"),),
    rules=rules,
    flops="4*span*q",
    moved=SEEN,
    rate="attention",
    rate_rows="T*G*kv_heads",
    implementations=(_CPU, *ON_CUDA),
    roles={"q": "attention", "y": "attention"},
)
