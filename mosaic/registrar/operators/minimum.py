"""y = min(x, other): numbers of the host, limited by numbers that the device computed."""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Operator

OPERATOR = Operator(
    name="minimum", operands="x:i32[B] other:i32[B] -> y:i32[B]", implementations=kernels_of("minimum", cuda="cuda")
)
