"""y[C] = canvas[rows], and `open_id` where a position is open: where the canvas has -1.

A canvas is a state of tokens, one a position, that steps read their windows from and write their decisions to. A row
outside the canvas is open.
"""

from __future__ import annotations

from typing import Final

from mosaic.registrar.operator import Implementation, Operator

OPEN: Final = -1
"""What a canvas has where nothing is decided."""


OPERATOR = Operator(
    name="read_canvas",
    operands="canvas@:i64[R] rows:i64[C] -> y:i64[C]",
    attrs="open_id",
    moved={"canvas": "rows"},
    rate_rows="C",
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.read_canvas"),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.read_canvas"),
    ),
    roles={"y": "hidden"},
)
