"""y[C] = canvas[rows], and `open_id` for open positions, which have -1 in the canvas.

A canvas is a state of tokens, one per position; steps read their windows from it and write their decisions to it. A row
outside the canvas is open.
"""

from __future__ import annotations

from typing import Final

from mosaic.registrar.operator import Implementation, Operator

OPEN: Final = -1
"""The canvas's value of undecided positions."""


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
