"""y[R, O] = x[R, I] @ weight[e].T for the rows of each expert e; offsets[E+1] bounds the runs."""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Operator
from mosaic.registrar.operators.linear import tiles

OPERATOR = Operator(
    name="grouped_linear",
    operands="x:a[R, I] weight:a[E, O, I] offsets:i64[E+1] -> y:a[R, O]",
    flops="2*R*I*O",
    rate="gemm",
    rate_rows="R/E",
    rate_columns="O",
    implementations=kernels_of("grouped_linear", tiles=tiles),
    roles={"x": "ffn", "y": "ffn"},
)
