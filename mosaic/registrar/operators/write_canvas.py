"""canvas[rows] = token where `taken` is not 0; everywhere, if it is left out. `read_canvas` says what a canvas is.

Rows are distinct where they are taken; one outside the canvas is that of nobody, and is left out.
"""

from __future__ import annotations

from mosaic.registrar.operator import Implementation, Operator

OPERATOR = Operator(
    name="write_canvas",
    operands="token:i64[C] rows:i64[C] canvas!@:i64[R] taken?:u8[C]",
    moved={"canvas": "token"},
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.write_canvas"),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.write_canvas"),
    ),
    roles={"token": "statistics"},
)
