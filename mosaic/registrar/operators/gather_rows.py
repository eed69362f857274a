"""y = x[rows]: hidden states [C, D] of the rows to unembed, and their positions [C]."""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Operator

OPERATOR = Operator(
    name="gather_rows",
    operands="x@:a[S, *D] rows:index[C] -> y:a[C, *D]",
    moved={"x": "y"},
    rate_rows="C",
    implementations=kernels_of("gather_rows"),
)
