"""y[M] = x[M] in rows whose `chosen`[M] is 1, in place; rows whose `chosen` is 0 stay as they are."""

from __future__ import annotations

from mosaic.registrar.operator import Implementation, Operator

OPERATOR = Operator(
    name="replace_rows",
    operands="y!:a[M] x:a[M] chosen:u8[M]",
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.replace_rows"),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.replace_rows"),
    ),
    roles={"y": "statistics", "x": "statistics"},
)
