"""bound[sets, S]: how much attention the voting rows of each sequence can give to the keys of each page, at most, per set of heads.

Quest (Tang et al. 2024, arXiv 2406.10774, section 3), for the rows of a block together as MAGE's equation 2 (arXiv 2602.14209) has
it. The product of a query with any key of a page is at most u = sum over d of max(q_d * least_d, q_d * largest_d), where least and
largest are the page's extrema (`page_extrema`). Sequence b has cu_pages[b + 1] - cu_pages[b] = P pages; page p of it has the row
page_table[cu_pages[b] + p] of `extrema`. Its rows of q are cu_seqlens[b] to cu_seqlens[b + 1]; those with votes 1 vote. With v,
over the voting rows and the heads of set s, the mean of u (`statistic` "mean", equation 2), the largest u ("max") or the least
("worst"), bound[s, cu_pages[b] + p] is (1 + max(v, 0)) / (1 + max(-v, 0)): above 0 and in the order of v, as `top_keys` wants it.
The query heads are divided evenly and in order among `sets`. Where P is 0, or no row votes, nothing is written, nor beyond P.

With `rows` above 0 each tile of rows has bounds of its own, as in `key_mass`. Nothing is ever sliced. `columns` is S. `page_span`,
the mean number of pages that a row is multiplied with, is for the cost model alone.
"""

from __future__ import annotations

from mosaic.registrar.dtypes import ITEMSIZE
from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, exact, require
from mosaic.registrar.operators.key_mass import STATISTICS, require_sets, require_tiles
from mosaic.registrar.operators.page_extrema import require_pages
from mosaic.registrar.tiles import KEY_ROWS, QUERY_ROWS, SCORES, Tile, Tiled, Tiles, compute_dtype


def infer(
    q: Spec, extrema: Spec, page_table: Spec, cu_pages: Spec, votes: Spec, cu_seqlens: Spec, positions: Spec | None = None,
    *, slot: int, kv_heads: int, head_size: int, sets: int, columns: Dim, page_span: Dim, statistic: str = "mean",
    block: int = 0, rows: int = 0, tiles: int = 1,
) -> tuple[Spec]:  # fmt: skip
    require(extrema.dtype == q.dtype, f"extrema must be {q.dtype} as q is, not {extrema.dtype}")
    require_sets(q, kv_heads, head_size, sets)
    require_pages(extrema, page_table, cu_pages, slot, kv_heads * head_size)
    require(cu_seqlens == cu_pages, f"cu_seqlens must be {cu_pages} as cu_pages is, not {cu_seqlens}")
    require(votes == Spec(q.shape[:1], "uint8"), f"votes must be uint8[{q.shape[0]}], not {votes}")
    require(statistic in STATISTICS, f"statistic must be one of {', '.join(STATISTICS)}, not '{statistic}'")
    require_tiles(q, positions, block, rows, tiles)
    return (Spec((sets * tiles, columns), "float32"),)


def flops(q: Spec, *_: object, page_span: Dim, **__: object) -> Dim:
    """Count two products with each page."""
    return 4 * page_span * q.elements


def bytes_moved(specs: Specs, attrs: Attrs) -> Dim:
    """Count the extrema of every page once for each tile."""
    pages = (
        specs["bound"].shape[1]
        * 2
        * attrs.get("tiles", 1)
        * attrs["kv_heads"]
        * attrs["head_size"]
        * ITEMSIZE[specs["extrema"].dtype]
    )
    return pages + sum(spec.bytes for name, spec in specs.items() if name != "extrema")


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List the tiles: queries as they are and what of them is above 0, extrema as they are and converted, scores, three columns."""
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
    reads=("q", "extrema", "page_table", "cu_pages", "votes", "cu_seqlens", "positions?"),
    writes=("bound",),
    whole=frozenset({"q", "extrema", "page_table", "cu_pages", "votes", "cu_seqlens", "positions"}),
    infer=infer,
    flops=flops,
    bytes_moved=bytes_moved,
    rate="attention",
    rate_rows=lambda q, *, head_size, **_: q.shape[0] * (exact(q.shape[-1]) / head_size),
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.page_bounds", scratch=Tiled(tiles)),
        Implementation(
            name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.page_bounds", scratch=query_sums
        ),
    ),
    roles={"q": "attention", "votes": "statistics", "bound": "statistics"},
)
