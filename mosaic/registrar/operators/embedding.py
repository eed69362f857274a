"""y[T, D] = table[ids]: token ids to hidden states."""

from __future__ import annotations

from mosaic.registrar.operator import Implementation, Operator

OPERATOR = Operator(
    name="embedding",
    operands="ids:index[T] table:a[V, D] -> y:a[T, D]",
    moved={"table": "y"},
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.embedding"),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.embedding"),
    ),
    roles={"y": "hidden"},
)
