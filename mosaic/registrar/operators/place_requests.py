"""Where the tokens, rows to decide and keys of the requests that a step serves lie, and what their rules go by.

row, begin and the bounds are those of `pack_requests`; table[S, C] has a row a request. Window i has the
positions from begin[i] on:

- positions[t], and token_rows[t] = CANVAS + position, the token's row of the canvas [R];
- of its rows to decide, positions of the block, as DECIDES says: decided_rows[m], the row of the canvas, and rows[m], the number of
  the token;
- extents[e], its entries of the list held_extents [X, 4], in order;
- quota[i], threshold[i] and edit_threshold[i].

Beyond the last window positions, rows, quotas, thresholds and extents are 0, and rows of the canvas -1.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Operator
from mosaic.registrar.request_table import COLUMNS

OPERATOR = Operator(
    name="place_requests",
    operands=f"""
        table@:i64[S, {COLUMNS}] canvas@:i64[R] held_extents@:i64[X, 4]
        row@:i64[B] begin@:i32[B] cu_seqlens@:i32[B+1] cu_rows@:i32[B+1] cu_extents@:i32[B+1]
        -> positions:i32[tokens] token_rows:i64[tokens] rows:i64[most] decided_rows:i64[most] extents:i64[count, 4]
        quota:i32[B] threshold:f32[B] edit_threshold:f32[B]
    """,
    attrs="tokens most count",
    moved={"canvas": "most"},
    implementations=kernels_of("place_requests"),
    roles={"positions": "statistics", "rows": "statistics", "decided_rows": "statistics"},
)
