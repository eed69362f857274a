"""y = x[rows]: hidden states [C, D] of the rows to unembed, and their positions [C]."""

from __future__ import annotations

from mosaic.registrar.operator import Implementation, Operator

OPERATOR = Operator(
    name="gather_rows",
    operands="x@:a[S, *D] rows:index[C] -> y:a[C, *D]",
    moved={"x": "y"},
    rate_rows="C",
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.gather_rows"),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.gather_rows"),
    ),
)
