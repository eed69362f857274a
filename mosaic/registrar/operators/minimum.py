"""y = min(x, other): numbers of the host, limited by numbers that the device computed."""

from __future__ import annotations

from mosaic.registrar.operator import Implementation, Operator

OPERATOR = Operator(
    name="minimum",
    operands="x:i32[B] other:i32[B] -> y:i32[B]",
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.minimum"),
        Implementation(name="cuda", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.minimum"),
    ),
)
