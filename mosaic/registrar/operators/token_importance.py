"""importance[B, K, P]: the attention of each sequence's voting rows to the positions of its block, per KV head.

FOCUS (Liang et al., "DLLMs Know How to Tame Their Compute Bound", equations 2 and 15). The block of sequence b begins at position
first[b] and has P positions. Its keys here are those at first[b] + listed[b, j], offsets that ascend and are followed by -1. Its
rows of q are cu_seqlens[b] to cu_seqlens[b + 1]; those with votes 1 vote. For a voting row r and a query head g of key-value head
h, s_j = q_r,g · k_j * scale, m_j is the largest of the s_i with |i - j| <= pool // 2, and p = softmax over j of m. importance[b,
h, listed[b, j]] is the sum of p_j over the voting rows and the query heads of h, and importance[b, h] is 0 at every other offset.
So the published importance of a token is the sum over h, and a layer's importances add up to voting rows times query
heads: the difference of two layers' importances is 0 on average.

Nothing is ever sliced. `mosaic.registrar.operators.kv_store` describes the layout of keys.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Specs, require
from mosaic.registrar.operators.kv_store import KV, require_layer
from mosaic.registrar.tiles import QUERY_ROWS, Tile, Tiles, compute_dtype


def rules(*, L: Dim, layer: int, pool: int, **_: object) -> None:
    require_layer("kv", L, layer)
    require(pool > 0 and pool % 2 == 1, f"pool must be odd, not {pool}")


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List the tiles: queries, keys, scores and pooled scores, a vector of rows, and two of keys."""
    size, positions = attrs["head_size"], specs["listed"].shape[1]
    compute = compute_dtype(specs["q"].dtype)
    scores, vector = Tile((QUERY_ROWS, positions), compute), Tile((positions,), compute)
    return (
        Tile((QUERY_ROWS, size), compute), Tile((positions, size), compute), scores, scores, Tile((QUERY_ROWS,), compute),
        vector, vector,
    )  # fmt: skip


OPERATOR = Operator(
    name="token_importance",
    operands=f"""
        q@:a[T, G*kv_heads*head_size] {KV} cu_seqlens@:i32[B+1] votes@:u8[T] first@:i32[B] listed@#:i32[B, P]
        -> importance#:f32[B, kv_heads, P]
    """,
    attrs="layer kv_heads head_size scale pool=3",
    rules=rules,
    flops="2*P*q",
    moved={"kv": "listed*kv_heads*head_size"},
    rate="attention",
    rate_rows="T*G*kv_heads",
    implementations=kernels_of("token_importance", tiles=tiles),
    roles={"q": "attention", "votes": "statistics", "importance": "statistics"},
)
