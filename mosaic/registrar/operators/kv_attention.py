"""y[T, N*H] = softmax(q k^T * scale) v per sequence and head, over keys and values kept in rows of kv[R, L*2*W].

`kv_store` says where the key of a position lies: in an extent of those that its sequence has. Sequence b sees its first
`seen[b]` keys, its window's own among them: they are stored first. With `block` a query sees those of its own block of
positions and of the blocks before: at position p the keys j < (p // block + 1) * block. With `sees[T, 2]` row r sees those at
positions in [sees[r, 0], sees[r, 1]), one at least, and no block counts. Queries and their positions may be
sliced by a region of tokens, the rest never; y may overwrite q; a row in no sequence, and one that sees no key, is left as
it was. For the cost model alone: `span`, the keys that a query sees on average, rounded up, and `keys`, those that all
sequences see together. `parts` are the rows of partial results, per query head, that there is room for (`kv_parts`): with 1,
a GPU goes through the keys of a tile of queries in one program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from mosaic.registrar.dtypes import ITEMSIZE
from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, exact, require
from mosaic.registrar.operators.attention import require_sees
from mosaic.registrar.operators.kv_store import require_extents, require_layer
from mosaic.registrar.tiles import KEY_ROWS, QUERY_ROWS, Tile, Tiled, Tiles, attention_tiles, compute_dtype


def infer(
    q: Spec, kv: Spec, extents: Spec, cu_extents: Spec, seen: Spec, cu_seqlens: Spec, positions: Spec,
    sees: Spec | None = None, *, layer: int, kv_heads: int, head_size: int, scale: float, span: Dim, keys: Dim, block: int = 0,
    parts: Dim = 1,
) -> tuple[Spec]:  # fmt: skip
    width = kv_heads * head_size
    columns = q.shape[-1]
    require(
        len(q.shape) == 2 and isinstance(columns, int) and columns % width == 0,
        f"q must have all heads of {head_size} for {kv_heads} KV heads, it has {columns} columns",
    )
    require(kv.dtype == q.dtype, f"kv must be {q.dtype} as q is, not {kv.dtype}")
    require_layer(kv, layer, width)
    require_extents(extents, cu_extents, cu_seqlens)
    sequences = cu_seqlens.shape[0] - 1
    require(seen == Spec((sequences,), "int32"), f"seen must be int32[{sequences}], not {seen}")
    require(positions == Spec(q.shape[:1], "int32"), f"positions must be int32[{q.shape[0]}], not {positions}")
    require(scale > 0, f"scale must be positive, not {scale}")
    require(block >= 0, f"block must be a number of positions, or 0 for none, not {block}")
    require_sees(q, sees, block)
    return (q,)


def flops(q: Spec, *, span: Dim, **_: object) -> Dim:
    return 4 * span * q.elements


def bytes_moved(specs: Specs, attrs: Attrs) -> Dim:
    """Count every key that is seen once, and only this layer's part of its row."""
    columns = 2 * attrs["kv_heads"] * attrs["head_size"]
    rows = attrs["keys"] * columns * ITEMSIZE[specs["kv"].dtype]
    return rows + sum(spec.bytes for name, spec in specs.items() if name != "kv")


def query_rows_and_heads(q: Spec, *, head_size: int, **_: object) -> Dim:
    """Return the launch's query rows times heads, which its rate goes by: they fill a GPU."""
    return q.shape[0] * (exact(q.shape[-1]) / head_size)


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List the tiles: queries of a group of heads side by side; of 16-bit inputs keys and values, converted."""
    size, dtype = attrs["head_size"], specs["q"].dtype
    compute = compute_dtype(dtype)
    converted = (Tile((KEY_ROWS, size), compute),) * 2 if compute != dtype else ()
    own = attention_tiles(size, compute, masked=bool(attrs.get("block")) or "sees" in specs)
    return Tile((QUERY_ROWS, size), compute), *converted, *own


def with_sums(specs: Specs, attrs: Attrs) -> Tiles:
    """List the log-sum-exps of a tile of rows, and the tiles above, as if by blocks."""
    return Tile((QUERY_ROWS,), compute_dtype(specs["q"].dtype)), *tiles(specs, {**attrs, "block": 1})


KV_SEGMENT_KEYS: Final = 1024
"""Keys that are worth a program of their own."""
KV_SEGMENTS: Final = 16
"""Most segments that a sequence's keys are cut into."""
KV_SEGMENT_TOKENS: Final = 512
"""Most tokens of a window times its segments: with the query heads that share keys, programs enough to fill a GPU."""
KV_SPLIT_TOKENS: Final = 512
"""Most tokens of a step whose segments go to programs of their own; with more, the windows fill a GPU."""


def kv_segments(window: int, keys: int) -> int:
    """Count the segments that the keys which a window of tokens sees are cut into; it depends on nothing but the request.

    The results of the segments are joined in order, whether one program computes them all or each has its own: so what a
    request attends to does not depend, to the bit, on others in its step.

    >>> [kv_segments(32, keys) for keys in (1, 1024, 4096, 1 << 17)], kv_segments(64, 1 << 17), kv_segments(2048, 1 << 17)
    ([1, 1, 4, 16], 8, 1)
    """
    wanted = min(KV_SEGMENTS, max(KV_SEGMENT_TOKENS // window, 1), max(math.ceil(keys / KV_SEGMENT_KEYS), 1))
    share = math.ceil(math.ceil(keys / wanted) / KV_SEGMENT_ALIGNED) * KV_SEGMENT_ALIGNED
    return max(math.ceil(keys / max(share, 1)), 1)


KV_SEGMENT_ALIGNED: Final = 128
"""Segments end at multiples of this number of keys: whole tiles."""


def kv_parts(windows: Sequence[int], keys: Sequence[int]) -> int:
    """Bound the rows of partial results, per query head, that windows of tokens leave where they see so many keys: `parts`.

    It is 1, the least value of a dim, where no segment goes to a program of its own.

    >>> kv_parts([32], [1 << 17]), kv_parts([32] * 3, [300, 4096, 9000]), kv_parts([32] * 17, [4096] * 17)
    (512, 416, 1)
    """
    if sum(windows) > KV_SPLIT_TOKENS:
        return 1
    split = [_parts(window, most) for window, most in zip(windows, keys, strict=True) if most > KV_SEGMENT_KEYS]
    return max(sum(split), 1)


def _parts(window: int, keys: int) -> int:
    return min(KV_SEGMENT_TOKENS, window * min(KV_SEGMENTS, -(-keys // KV_SEGMENT_KEYS)))


def segment_results(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve partial results of segments: a float32 row, its maximum and its sum, of each head."""
    size = attrs["head_size"]
    return attrs.get("parts", 1) * (exact(specs["q"].shape[-1]) / size) * (size + 2) * 4


OPERATOR = Operator(
    name="kv_attention",
    reads=("q", "kv", "extents", "cu_extents", "seen", "cu_seqlens", "positions", "sees?"),
    writes=("y",),
    whole=frozenset({"kv", "extents", "cu_extents", "seen", "cu_seqlens"}),
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
            name="triton",
            backend="cuda",
            kernel="mosaic.kernels.cuda.kv_attention",
            scratch=segment_results,
            row_origin="q",
        ),
        Implementation(
            name="invariant",
            backend="cuda",
            kernel="mosaic.kernels.cuda.kv_attention:launch_invariant",
            scratch=segment_results,
            row_origin="q",
            invariant=True,
            on_request=True,
        ),
    ),
    roles={"q": "attention", "y": "attention"},
)
