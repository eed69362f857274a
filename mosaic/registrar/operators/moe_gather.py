"""y[C*k, D] = x[order // k]: rows of x permuted to expert order."""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Implementation, Operator, Specs
from mosaic.registrar.tiles import Tile, Tiled, Tiles


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    return Tile((1,), "int64"), Tile((specs["order"].shape[0],), "int64")


OPERATOR = Operator(
    name="moe_gather",
    operands="x:a[C, D] order:i64[C*top_k] -> y:a[C*top_k, D]",
    attrs="top_k",
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.moe_gather", scratch=Tiled(tiles)),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.moe_gather"),
    ),
)
