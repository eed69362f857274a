"""y[T, D] = table[ids]: token ids to hidden states."""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Operator

OPERATOR = Operator(
    name="embedding",
    operands="ids:index[T] table:a[V, D] -> y:a[T, D]",
    moved={"table": "y"},
    implementations=kernels_of("embedding"),
    roles={"y": "hidden"},
)
