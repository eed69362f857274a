"""x[T, N*H] = per-head RMSNorm with weight[H], in place (query and key norms)."""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Implementation, Operator, Specs
from mosaic.registrar.tiles import Tiled, Tiles, norm_tiles


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    (rows, columns), (size,) = specs["x"].shape, specs["weight"].shape
    return norm_tiles(rows, columns // size, size, specs["x"].dtype)


OPERATOR = Operator(
    name="head_norm",
    operands="x!:a[*T, N*H] weight:a[H]",
    attrs="eps",
    flops="4*x",
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.head_norm", scratch=Tiled(tiles)),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.head_norm"),
    ),
    roles={"x": "attention"},
)
