"""x[T, N*H] = per-head RMSNorm with weight[H], in place (query and key norms)."""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Operator, Specs
from mosaic.registrar.tiles import Tiles, norm_tiles


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    (rows, columns), (size,) = specs["x"].shape, specs["weight"].shape
    return norm_tiles(rows, columns // size, size, specs["x"].dtype)


OPERATOR = Operator(
    name="head_norm",
    operands="x!:a[*T, N*H] weight:a[H]",
    attrs="eps",
    flops="4*x",
    implementations=kernels_of("head_norm", tiles=tiles),
    roles={"x": "attention"},
)
