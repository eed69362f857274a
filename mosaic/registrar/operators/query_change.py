"""change[B]: the relative change of each sequence's queries since they were kept; refreshed ones are kept anew.

A kept attention output over a prefix is valid as far as the queries are still those that it was computed with
(FlashBlock, LoSA: arXiv 2602.05305, 2604.12056). Sequence b has prefix[b] = P keys before its block, and its rows of q
are cu_seqlens[b] to cu_seqlens[b + 1]. If refreshed[b] is not 0, its rows at positions p >= P are written to
kept[owner[b], p - P, N*H], and change[b] is 0. Otherwise, and in a step without `refreshed`, change[b] is sqrt(sum of
(q - kept)^2 / sum of kept^2) over all its rows and columns: the Frobenius norm of the difference divided by that of the
kept queries. It is 0 if P is 0, if there are no rows, or if both are equal. Nothing is ever sliced.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Specs, require
from mosaic.registrar.tiles import Tile, Tiles, compute_dtype


def rules(*, J: Dim, rows: int, **_: object) -> None:
    require(rows > 0 and bool(J > 0), f"a block has at least one row, and kept a slot, not {rows} and {J}")


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List two rows and two sums."""
    compute, columns = compute_dtype(specs["q"].dtype), specs["q"].shape[1]
    return (Tile((columns,), compute), Tile((columns,), compute), Tile((3,), compute))


def row_sums(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve the two sums of every row, in float32."""
    return 8 * specs["q"].shape[0]


OPERATOR = Operator(
    name="query_change",
    operands="""
        q@:a[T, Q] kept!@#:a[S, J*rows*Q] owner@:i64[B] prefix@:i32[B] cu_seqlens@:i32[B+1] positions@:i32[T]
        refreshed?@:i32[B] -> change:f32[B]
    """,
    attrs="rows",
    rules=rules,
    flops="5*q",
    moved={"kept": "q"},
    implementations=kernels_of("query_change", tiles=tiles, scratch=row_sums),
    roles={"q": "attention", "kept": "attention", "change": "statistics"},
)
