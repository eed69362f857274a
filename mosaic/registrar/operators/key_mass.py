"""mass[sets, S]: the attention of each sequence's voting rows to each key of its prefix, per set of heads.

MAGE (arXiv 2602.14209, section 4, equation 3). Sequence b has captured[b] = P keys in its prefix, at the positions 0 to P - 1,
where P is at most cu_keys[b + 1] - cu_keys[b]. Its rows of q are cu_seqlens[b] to cu_seqlens[b + 1]; those with votes 1 vote.
With p = softmax over the prefix alone of q_r,g · k_j * scale, for voting row r and query head g, mass[s, cu_keys[b] + j] is,
over the voting rows and the heads of set s, the mean of p (`statistic` "mean", equation 3), the largest p ("max") or the least
("worst").
logsumexp[T, N] is the log-sum-exp of a row and head's scores over its prefix (`prefix_logsumexp`); only voting rows'
values are read. The query heads are divided evenly and in order among `sets`; sets = kv_heads is the published choice,
and with as many sets as query heads each head has its own. If P is 0 or no row votes, nothing is written; columns from
P on are not written.

With `rows` above 0 the rows of a `block` are cut into `tiles` of `rows` rows, the last of which may be smaller:
position p is in tile t = (p % block) // rows. Each tile has its own statistics, over the voting rows of b in it, or
over all voting rows of b if the tile has none: those of tile t and set s are mass[s * tiles + t].

q, logsumexp, votes and positions are never sliced. `columns` is S. `span`, the mean number of keys in a row's softmax,
is for the cost model alone. `mosaic.registrar.operators.kv_store` describes the layout of keys.
"""

from typing import Final

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Spec, Specs, require
from mosaic.registrar.operators.kv_store import KV, require_layer
from mosaic.registrar.tiles import KEY_ROWS, QUERY_ROWS, SCORES, Tile, Tiles, compute_dtype

STATISTICS: Final = ("mean", "max", "worst")


def rules(
    *, L: Dim, layer: int, kv_heads: int, sets: int, statistic: str, positions: Spec | None, block: int, rows: int, tiles: int,
    **_: object,
) -> None:  # fmt: skip
    require_layer("kv", L, layer)
    require_sets(kv_heads, sets, statistic)
    require((positions is None) == (rows == 0), "positions go with tiles of rows")
    require_tiles(block, rows, tiles)


def require_tiles(block: int, rows: int, tiles: int) -> None:
    """Refuse tiles of rows that do not match the block."""
    require(rows >= 0, f"rows must be those of a tile, or 0 for no tiles, not {rows}")
    count = -(-block // rows) if rows else 1
    require(tiles == count > 0, f"tiles must be {count}, of {rows} rows of a block of {block}, not {tiles}")


def require_sets(kv_heads: int, sets: int, statistic: str = "mean") -> None:
    """Refuse a number of sets that is no multiple of the key-value heads, and an unknown statistic."""
    require(sets > 0 and sets % kv_heads == 0, f"sets must be a multiple of the {kv_heads} KV heads, not {sets}")
    require(statistic in STATISTICS, f"statistic must be one of {', '.join(STATISTICS)}, not '{statistic}'")


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List the tiles: queries, converted keys if needed, scores, a vector of rows, and two of keys."""
    size, dtype = attrs["head_size"], specs["q"].dtype
    compute = compute_dtype(dtype)
    converted = (Tile((KEY_ROWS, size), compute),) if compute != dtype else ()
    columns = Tile((KEY_ROWS,), compute), Tile((KEY_ROWS,), "float32")
    return (
        Tile((QUERY_ROWS, size), compute),
        Tile((SCORES,), compute),
        Tile((QUERY_ROWS,), compute),
        *columns,
        *converted,
    )


OPERATOR = Operator(
    name="key_mass",
    operands=f"""
        q@:a[T, M*sets*head_size] {KV} captured@:i32[B] cu_keys@:i32[B+1] votes@:u8[T] cu_seqlens@:i32[B+1]
        logsumexp@:f32[T, M*sets] positions?@:i32[T] -> mass:f32[sets*tiles, columns]
    """,
    attrs="layer kv_heads head_size scale sets columns span statistic='mean' block=0 rows=0 tiles=1",
    rules=rules,
    flops="2*span*q",
    moved={"kv": "columns*kv_heads*head_size*tiles"},
    rate="attention",
    rate_rows="T*M*sets",
    implementations=kernels_of("key_mass", tiles=tiles, invariant="key_mass:launch_invariant"),
    roles={"q": "attention", "votes": "statistics", "logsumexp": "statistics", "mass": "statistics"},
)
