"""y[T, O] += x[T, I] @ weight[O, I].T: a projection accumulated into the residual stream."""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Operator
from mosaic.registrar.operators.linear import tiles

OPERATOR = Operator(
    name="linear_add",
    operands="x:a[*T, I] weight:a[O, I] y!:a[*T, O]",
    flops="2*x*O",
    rate="gemm",
    rate_columns="O",
    implementations=kernels_of("linear_add", tiles=tiles, cuda="cublas", invariant="invariant_linear:launch_add"),
    roles={"y": "hidden"},
)
