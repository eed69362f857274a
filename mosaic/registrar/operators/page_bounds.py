"""bound[sets, S]: an upper bound of the attention of each sequence's voting rows to each page's keys, per set of heads.

Quest (Tang et al. 2024, arXiv 2406.10774, section 3), for all rows of a block as in MAGE's equation 2 (arXiv
2602.14209). The product of a query with any key of a page is at most u = sum over d of max(q_d * least_d, q_d *
largest_d), with the page's extrema least and largest (`page_extrema`). Sequence b has cu_pages[b + 1] - cu_pages[b] = P
pages; its page p has the row page_table[cu_pages[b] + p] of `extrema`. Its rows of q are cu_seqlens[b] to cu_seqlens[b
+ 1]; those with votes 1 vote. Let v be, over the voting rows and the heads of set s, the mean of u (`statistic` "mean",
equation 2), the largest u ("max") or the least ("worst"). Then bound[s, cu_pages[b] + p] is (1 + max(v, 0)) / (1 +
max(-v, 0)): above 0 and increasing in v, as `top_keys` requires. The query heads are divided evenly and in order among
`sets`. If P is 0 or no row votes, nothing is written; columns from P on are not written.

With `rows` above 0 each tile of rows has its own bounds, as in `key_mass`. Nothing is ever sliced. `columns` is S.
`page_span`, the mean number of pages that a row is multiplied with, is for the cost model alone.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Spec, Specs, require
from mosaic.registrar.operators.key_mass import require_sets, require_tiles
from mosaic.registrar.operators.kv_store import require_layer
from mosaic.registrar.tiles import KEY_ROWS, QUERY_ROWS, SCORES, Tile, Tiles, compute_dtype


def rules(
    *, J: Dim, slot: int, kv_heads: int, sets: int, statistic: str, positions: Spec | None, block: int, rows: int, tiles: int,
    **_: object,
) -> None:  # fmt: skip
    require_layer("extrema", J, slot)
    require_sets(kv_heads, sets, statistic)
    require((positions is None) == (rows == 0), "positions go with tiles of rows")
    require_tiles(block, rows, tiles)


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List the tiles: queries and their positive parts, extrema and their converted copies, scores, three columns."""
    size, dtype = attrs["head_size"], specs["q"].dtype
    compute = compute_dtype(dtype)
    query, pages = Tile((QUERY_ROWS, size), compute), Tile((2, KEY_ROWS, size), dtype)
    converted = (Tile((2, KEY_ROWS, size), compute),) if compute != dtype else ()
    column = Tile((KEY_ROWS,), compute)
    return query, query, pages, Tile((SCORES,), compute), column, column, column, *converted


def query_sums(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve, for the mean, two float32 rows and a count for each sequence, set and tile."""
    if attrs.get("statistic", "mean") != "mean":
        return 0
    pairs = (specs["cu_pages"].shape[0] - 1) * attrs["sets"] * attrs.get("tiles", 1)
    return 4 * pairs * (2 * attrs["head_size"] + 1)


OPERATOR = Operator(
    name="page_bounds",
    operands="""
        q@:a[T, M*sets*head_size] extrema@:a[E, J*2*kv_heads*head_size] page_table@:i64[N] cu_pages@:i32[B+1] votes@:u8[T]
        cu_seqlens@:i32[B+1] positions?@:i32[T] -> bound:f32[sets*tiles, columns]
    """,
    attrs="slot kv_heads head_size sets columns page_span statistic='mean' block=0 rows=0 tiles=1",
    rules=rules,
    flops="4*page_span*q",
    moved={"extrema": "2*columns*tiles*kv_heads*head_size"},
    rate="attention",
    rate_rows="T*M*sets",
    implementations=kernels_of("page_bounds", tiles=tiles, scratch=query_sums),
    roles={"q": "attention", "votes": "statistics", "bound": "statistics"},
)
