"""canvas[rows] = token where `taken` is not 0. `read_canvas` describes a canvas.

Taken rows are distinct; a row outside the canvas is skipped.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Operator

OPERATOR = Operator(
    name="write_canvas",
    operands="token:i64[C] rows:i64[C] canvas!@:i64[R] taken:u8[C]",
    moved={"canvas": "token"},
    implementations=kernels_of("write_canvas"),
    roles={"token": "statistics"},
)
