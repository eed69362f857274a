"""y[C] = canvas[rows], and `open_id` for open positions, which have -1 in the canvas.

A canvas is a state of tokens, one per position; steps read their windows from it and write their decisions to it. A row
outside the canvas is open.
"""

from typing import Final

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Operator

OPEN: Final = -1
"""The canvas's value of undecided positions."""


OPERATOR = Operator(
    name="read_canvas",
    operands="canvas@:i64[R] rows:i64[C] -> y:i64[C]",
    attrs="open_id",
    moved={"canvas": "rows"},
    rate_rows="C",
    implementations=kernels_of("read_canvas"),
    roles={"y": "hidden"},
)
