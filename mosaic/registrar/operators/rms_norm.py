"""y[T, D] = x / sqrt(mean(x^2) + eps) * weight, in float32, cast back. y may overwrite x."""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Operator, Specs
from mosaic.registrar.tiles import Tiles, norm_tiles


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    rows, width = specs["x"].shape
    return norm_tiles(rows, 1, width, specs["x"].dtype)


OPERATOR = Operator(
    name="rms_norm",
    operands="x:a[*T, D] weight:a[D] -> y:a[*T, D]",
    attrs="eps",
    inplace=(("y", "x"),),
    flops="4*x",
    implementations=kernels_of("rms_norm", tiles=tiles),
)
