"""y[T, D] = x / sqrt(mean(x^2) + eps) * weight, in float32, cast back. y may overwrite x."""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Implementation, Operator, Specs
from mosaic.registrar.tiles import Tiled, Tiles, norm_tiles


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    rows, width = specs["x"].shape
    return norm_tiles(rows, 1, width, specs["x"].dtype)


OPERATOR = Operator(
    name="rms_norm",
    operands="x:a[*T, D] weight:a[D] -> y:a[*T, D]",
    attrs="eps",
    inplace=(("y", "x"),),
    flops="4*x",
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.rms_norm", scratch=Tiled(tiles)),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.rms_norm"),
    ),
)
