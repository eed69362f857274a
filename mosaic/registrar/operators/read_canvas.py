"""y[C] = canvas[rows], and `open_id` where a position is open: where the canvas has -1.

A canvas is a state of tokens, one a position, that steps read their windows from and write their decisions to. A row
outside the canvas is open.
"""

from typing import Final

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Operator

OPEN: Final = -1
"""What a canvas has where nothing is decided."""


OPERATOR = Operator(
    name="read_canvas",
    operands="canvas@:i64[R] rows:i64[C] -> y:i64[C]",
    attrs="open_id",
    moved={"canvas": "rows"},
    rate_rows="C",
    implementations=kernels_of("read_canvas"),
    roles={"y": "hidden"},
)
