"""canvas[rows] = token where `taken` is not 0; everywhere, if it is left out. `read_canvas` says what a canvas is.

Rows are distinct where they are taken; one outside the canvas is that of nobody, and is left out.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Operator

OPERATOR = Operator(
    name="write_canvas",
    operands="token:i64[C] rows:i64[C] canvas!@:i64[R] taken?:u8[C]",
    moved={"canvas": "token"},
    implementations=kernels_of("write_canvas"),
    roles={"token": "statistics"},
)
