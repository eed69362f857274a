"""y[T, N*H]: attention to a block's own keys, merged with given attention to its prefix.

FlashBlock (arXiv 2602.05305) keeps the output over the prefix with its log-sum-exp within a block. Sequence b has
prefix[b] = P keys before its block, at the positions 0 to P - 1, and seen[b] keys in all, including those of its
window, which are stored first (`kv_store`). A row at position p attends to the keys from P to seen[b]; with `block`,
only to keys j < (p // block + 1) * block. Its output and log-sum-exp over the keys below P are given: if refreshed[b]
is not 0, in its rows of `fresh` and `fresh_sums` (`prefix_attention`); otherwise, and in a step without these, in the
states `kept` and `kept_sums`. With P = 0 there are none. Both are merged as one softmax over all keys. A row in no
sequence, or without a visible key, is unchanged.

The states have one row per request; sequence b has row owner[b] in both. A row has `rows` tokens of every layer that
keeps outputs (`slot` is this layer's index among them): kept[owner, slot, p - P, N*H] and kept_sums[owner, slot, p - P,
N]. Fresh outputs are written there, except for rows below P, which belong to the previous block. Without states, every
row with a prefix is fresh. Nothing is ever sliced. y may overwrite q.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Spec, Specs, require
from mosaic.registrar.operators.kv_attention import with_sums
from mosaic.registrar.operators.kv_store import KV, require_layer
from mosaic.registrar.tiles import QUERY_ROWS, Tile, Tiles, compute_dtype


def rules(
    *, L: Dim, layer: int, slot: int, scale: float, block: int, kept: Spec | None, kept_sums: Spec | None,
    owner: Spec | None, fresh: Spec | None, fresh_sums: Spec | None, refreshed: Spec | None, J: Dim = 0, **_: object,
) -> None:  # fmt: skip
    require_layer("kv", L, layer)
    require(scale > 0, f"scale must be positive, not {scale}")
    require(block >= 0, f"block must be a number of positions, or 0 for none, not {block}")
    require((kept is None) == (kept_sums is None) == (owner is None), "kept, kept_sums and owner go together")
    require(
        (fresh is None) == (fresh_sums is None) == (refreshed is None), "fresh, fresh_sums and refreshed go together"
    )
    require(kept is not None or fresh is not None, "kept or fresh must be given: what is known of the prefix")
    require(kept is None or bool(0 <= slot < J), f"kept has {J} slots, not slot {slot}")


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List the given outputs and log-sum-exps of a tile of rows, and the tiles of `prefix_attention`."""
    compute = compute_dtype(specs["q"].dtype)
    return (Tile((QUERY_ROWS, attrs["head_size"]), compute), Tile((QUERY_ROWS,), compute), *with_sums(specs, attrs))


OPERATOR = Operator(
    name="joined_attention",
    operands=f"""
        q@:a[T, G*kv_heads*head_size] {KV} seen@:i32[B] cu_seqlens@:i32[B+1] positions@:i32[T] prefix@:i32[B]
        kept?!@#:a[S, J*rows*G*kv_heads*head_size] kept_sums?!@#:f32[U, J*rows*G*kv_heads] owner?@:i64[B]
        fresh?@:a[T, G*kv_heads*head_size] fresh_sums?@:f32[T, G*kv_heads] refreshed?@:i32[B]
        -> y:a[T, G*kv_heads*head_size]
    """,
    attrs="layer slot rows kv_heads head_size scale block=0",
    inplace=(("y", "q"),),
    rules=rules,
    flops="4*rows*q",
    moved={"kv": "2*B*rows*kv_heads*head_size", "kept": "q", "kept_sums": "T*kv_heads"},
    rate="attention",
    rate_rows="T*G*kv_heads",
    implementations=kernels_of("joined_attention", tiles=tiles, invariant="joined_attention:launch_invariant"),
    roles={"q": "attention", "y": "attention", "kept": "attention", "fresh": "attention", "kept_sums": "statistics"},
)  # fmt: skip
