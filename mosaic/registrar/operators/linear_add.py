"""y[T, O] += x[T, I] @ weight[O, I].T: a projection accumulated into the residual stream."""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Operator, Specs
from mosaic.registrar.tiles import Tiles, linear_tiles


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    return linear_tiles(specs["x"].dtype)


OPERATOR = Operator(
    name="linear_add",
    operands="x:a[*T, I] weight:a[O, I] y!:a[*T, O]",
    flops="2*x*O",
    rate="gemm",
    rate_columns="O",
    implementations=kernels_of("linear_add", tiles=tiles, cuda="cublas", invariant="invariant_linear:launch_add"),
    roles={"y": "hidden"},
)
