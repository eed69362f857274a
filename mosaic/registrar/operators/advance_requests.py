"""A table of requests after a step: what was committed is taken, blocks and requests end, and report[B, W] says how all stand.

Operands are those of `place_requests`, with canvas[R] after the decisions of the step. For window i:

- of a prompt, WRITTEN grows by its tokens;
- of a block, OPEN is what is open, STEP and NUMBER grow by 1, BEFORE is 0. What precedes the block's
  first open position is final. If a final token of the answer is one of STOP, or all of the answer is final, the
  request has ENDED. Otherwise, where nothing is open, the next block begins, and of windows by blocks BEFORE is the block;
- of a block that is edited (`ALL_ONES`), the same, but that it ends as said there, and that nothing of it is final before. The mask
  token is `mask_id`;
- of a block with a schedule, QUOTA and STEP become those of its entry NUMBER.

A window without tokens, behind all others, was not computed: its request stays as it is, but that the turn in which it was
served counts B - i less, so that it comes before those who were, and in the order in which it has waited.

report[i] has the columns `mosaic.registrar.request_table.Reported`; its row is -1 beyond the last window that was computed.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Operator
from mosaic.registrar.request_table import COLUMNS, Column, Reported

WIDTH = Reported.WRITTEN + COLUMNS - Column.WRITTEN

OPERATOR = Operator(
    name="advance_requests",
    operands=f"""
        table!@:i64[S, {COLUMNS}] canvas@:i64[R]
        row@:i64[B] begin@:i32[B] cu_seqlens@:i32[B+1] cu_rows@:i32[B+1]
        -> report:i64[B, {WIDTH}]
    """,
    attrs="mask_id",
    moved={"canvas": "row"},
    implementations=kernels_of("advance_requests"),
)
