"""y[T, O] += x[T, I] @ weight[O, I].T: a projection accumulated into the residual stream."""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Implementation, Operator, Specs
from mosaic.registrar.tiles import Tiled, Tiles, linear_tiles


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    return linear_tiles(specs["x"].dtype)


OPERATOR = Operator(
    name="linear_add",
    operands="x:a[*T, I] weight:a[O, I] y!:a[*T, O]",
    flops="2*x*O",
    rate="gemm",
    rate_columns="O",
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.linear_add", scratch=Tiled(tiles)),
        Implementation(name="cublas", backend="cuda", kernel="mosaic.kernels.cuda.linear_add"),
        Implementation(
            name="invariant",
            backend="cuda",
            kernel="mosaic.kernels.cuda.invariant_linear:launch_add",
            invariant=True,
            on_request=True,
        ),
    ),
    roles={"y": "hidden"},
)
