"""What the rows to decide of a table's requests draw by: random keys, temperature, top-p and top-k, whether these cut, and the
temperature at which scores are perturbed.

Row m of window i is of the request table[row[i]]: its key is that of the request's NOISE, its STEP and the row's position
(`mosaic.decoding.noise`). Beyond the last row all are 0, and top_p 1.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Operator
from mosaic.registrar.request_table import COLUMNS

OPERATOR = Operator(
    name="draw_requests",
    operands=f"""
        table@:i64[S, {COLUMNS}] row@:i64[B] cu_rows@:i32[B+1] decided_rows@:i64[M]
        -> keys:i64[M] temperature:f32[M] top_p:f32[M] top_k:i32[M] cuts:u8[M] score_temperature:f32[M]
    """,
    implementations=kernels_of("draw_requests"),
    roles={"keys": "statistics"},
)
