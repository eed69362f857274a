"""logsumexp[T, N]: the log-sum-exp of each voting row and head's scores over the row's prefix.

It normalises MAGE's statistic of keys (arXiv 2602.14209, equation 3; `key_mass`). Sequence b has captured[b] = P keys
in its prefix, at the positions 0 to P - 1. Its rows of q are cu_seqlens[b] to cu_seqlens[b + 1]; those with votes 1
vote. For a voting row r and query head g it is log(sum over j < P of exp(q_r,g · k_j * scale)). Values of rows that do
not vote, and of sequences with P = 0, are undefined.

q and votes are never sliced. For the cost model alone: `span`, the mean number of keys in a row's sum, and `keys`, the
number in all prefixes. `mosaic.registrar.operators.kv_store` describes the layout of keys.
"""

from typing import Final

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Specs, exact
from mosaic.registrar.operators.kv_store import KV, require_layer
from mosaic.registrar.tiles import KEY_ROWS, QUERY_ROWS, SCORES, Tile, Tiles, compute_dtype


def rules(*, L: Dim, layer: int, **_: object) -> None:
    require_layer("kv", L, layer)


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List the tiles: queries, converted keys if needed, scores, and vectors of rows."""
    size, dtype = attrs["head_size"], specs["q"].dtype
    compute = compute_dtype(dtype)
    converted = (Tile((KEY_ROWS, size), compute),) if compute != dtype else ()
    rows = (Tile((QUERY_ROWS,), compute),) * 5
    return Tile((QUERY_ROWS, size), compute), Tile((SCORES,), compute), *rows, *converted


SPLITS: Final = 32
"""Splits of a prefix, a power of two. It depends on no other request, and so neither does the selection."""
SPLIT_KEYS: Final = 256
"""Fewest keys of a split; of a short prefix the last splits are empty."""


def sums(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve a float32 log-sum-exp for every row and head in every split."""
    rows, columns = specs["q"].shape
    return 4 * SPLITS * rows * int(exact(columns) / attrs["head_size"])


OPERATOR = Operator(
    name="prefix_logsumexp",
    operands=f"""
        q@:a[T, G*kv_heads*head_size] {KV} captured@:i32[B] votes@:u8[T] cu_seqlens@:i32[B+1]
        -> logsumexp:f32[T, G*kv_heads]
    """,
    attrs="layer kv_heads head_size scale span keys",
    rules=rules,
    flops="2*span*q",
    moved={"kv": "keys*kv_heads*head_size"},
    rate="attention",
    rate_rows="T*G*kv_heads",
    implementations=kernels_of(
        "prefix_logsumexp", tiles=tiles, scratch=sums, invariant="prefix_logsumexp:launch_invariant"
    ),
    roles={"q": "attention", "votes": "statistics", "logsumexp": "statistics"},
)
