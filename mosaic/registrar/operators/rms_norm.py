"""y[T, D] = x / sqrt(mean(x^2) + eps) * weight, in float32, cast back. y may overwrite x."""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, require
from mosaic.registrar.tiles import Tiled, Tiles, norm_tiles


def infer(x: Spec, weight: Spec, *, eps: float) -> tuple[Spec]:
    require(weight.shape == (x.shape[-1],), f"the weight must have {x.shape[-1]} elements")
    return (x,)


def flops(x: Spec, weight: Spec, *, eps: float) -> Dim:
    return 4 * x.elements


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    rows, width = specs["x"].shape
    return norm_tiles(rows, 1, width, specs["x"].dtype)


OPERATOR = Operator(
    name="rms_norm",
    reads=("x", "weight"),
    writes=("y",),
    inplace=(("y", "x"),),
    infer=infer,
    flops=flops,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.rms_norm", scratch=Tiled(tiles)),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.rms_norm"),
    ),
)
