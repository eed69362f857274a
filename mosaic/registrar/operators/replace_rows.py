"""y[M] = x[M] in rows whose `chosen`[M] is 1, in place; rows whose `chosen` is 0 stay as they are."""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Operator

OPERATOR = Operator(
    name="replace_rows",
    operands="y!:a[M] x:a[M] chosen:u8[M]",
    implementations=kernels_of("replace_rows"),
    roles={"y": "statistics", "x": "statistics"},
)
