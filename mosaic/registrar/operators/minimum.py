"""y = min(x, other): numbers that the host gives, held to what the device has computed."""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Operator

OPERATOR = Operator(
    name="minimum",
    operands="x:i32[B] other:i32[B] -> y:i32[B]",
    implementations=kernels_of("minimum", cuda="cuda"),
)
