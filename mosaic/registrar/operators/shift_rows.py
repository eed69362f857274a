"""y[M] = max(rows - 1, first row of the sequence): Dream's logit shift, done on indices (row i-1 predicts i)."""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Operator, Specs
from mosaic.registrar.tiles import Tile, Tiles


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    (rows,), (bounds,) = specs["rows"].shape, specs["cu_seqlens"].shape
    return Tile((1,), "int64"), Tile((bounds,), "int64"), Tile((rows,), "int64"), Tile((rows,), "int64")


OPERATOR = Operator(
    name="shift_rows",
    operands="rows:i64[M] cu_seqlens:i32[B+1] -> y:i64[M]",
    implementations=kernels_of("shift_rows", tiles=tiles),
)
