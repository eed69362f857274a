"""y[T, O] = x[T, I] @ weight[O, I].T (+ bias[O])."""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Implementation, Operator, Specs
from mosaic.registrar.tiles import Tiled, Tiles, linear_tiles


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    return linear_tiles(specs["x"].dtype)


OPERATOR = Operator(
    name="linear",
    operands="x:a[*T, I] weight:a[O, I] bias?:a[O] -> y:a[*T, O]",
    flops="2*x*O",
    rate="gemm",
    rate_columns="O",
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.linear", scratch=Tiled(tiles)),
        Implementation(name="cublas", backend="cuda", kernel="mosaic.kernels.cuda.linear"),
        Implementation(
            name="invariant",
            backend="cuda",
            kernel="mosaic.kernels.cuda.invariant_linear",
            invariant=True,
            on_request=True,
        ),
    ),
)
