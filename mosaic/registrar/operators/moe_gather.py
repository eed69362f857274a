"""y[C*k, D] = x[order // k]: rows of x permuted to expert order."""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Operator, Specs
from mosaic.registrar.tiles import Tile, Tiles


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    return Tile((1,), "int64"), Tile((specs["order"].shape[0],), "int64")


OPERATOR = Operator(
    name="moe_gather",
    operands="x:a[C, D] order:i64[C*top_k] -> y:a[C*top_k, D]",
    attrs="top_k",
    implementations=kernels_of("moe_gather", tiles=tiles),
)
