"""gate[T, F] = silu(gate) * up, in place."""

from __future__ import annotations

from mosaic.registrar.operator import Implementation, Operator

OPERATOR = Operator(
    name="silu_mul",
    operands="gate!:a[*F] up:a[*F]",
    flops="5*gate",
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.silu_mul"),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.silu_mul"),
    ),
    roles={"gate": "ffn", "up": "ffn"},
)
