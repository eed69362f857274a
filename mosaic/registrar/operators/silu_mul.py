"""gate[T, F] = silu(gate) * up, in place."""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Operator

OPERATOR = Operator(
    name="silu_mul",
    operands="gate!:a[*F] up:a[*F]",
    flops="5*gate",
    implementations=kernels_of("silu_mul"),
    roles={"gate": "ffn", "up": "ffn"},
)
