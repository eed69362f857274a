"""y[C*k, D] = x[order // k]: rows of x permuted to expert order."""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Implementation, Operator, Spec, Specs, require
from mosaic.registrar.tiles import Tile, Tiled, Tiles


def infer(x: Spec, order: Spec, *, top_k: int) -> tuple[Spec]:
    require(order.shape[0] == x.shape[0] * top_k, f"order must have {x.shape[0] * top_k} entries")
    return (Spec((order.shape[0], x.shape[1]), x.dtype),)


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    return Tile((1,), "int64"), Tile((specs["order"].shape[0],), "int64")


OPERATOR = Operator(
    name="moe_gather",
    reads=("x", "order"),
    writes=("y",),
    infer=infer,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.moe_gather", scratch=Tiled(tiles)),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.moe_gather"),
    ),
)
