"""x[T, N*H] = per-head RMSNorm with weight[H], in place (query and key norms)."""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, divides, require
from mosaic.registrar.tiles import Tiled, Tiles, norm_tiles


def infer(x: Spec, weight: Spec, *, eps: float) -> tuple[()]:
    size = weight.shape[0]
    require(divides(size, x.shape[-1]), f"x must have heads of {size}, it has {x.shape[-1]} columns")
    return ()


def flops(x: Spec, weight: Spec, *, eps: float) -> Dim:
    return 4 * x.elements


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    (rows, columns), (size,) = specs["x"].shape, specs["weight"].shape
    return norm_tiles(rows, columns // size, size, specs["x"].dtype)


OPERATOR = Operator(
    name="head_norm",
    reads=("x", "weight"),
    updates=("x",),
    infer=infer,
    flops=flops,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.head_norm", scratch=Tiled(tiles)),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.head_norm"),
    ),
    roles={"x": "attention"},
)
