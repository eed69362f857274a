"""Which requests of a table the next step serves, and the bounds of their windows, as far as the step has room.

table[S, C] has a row a request (`mosaic.registrar.request_table`); room[0] = first, count, tokens, rows,
extents, groups, marked, holds. The `count` rows from `first` on are looked at. A request whose state is RUNNING wants

- while WRITTEN < PREFIX, the next tokens of its prompt, whole blocks and as many as there are, and decides no row;
- else a step of its block, as WINDOW says. It decides the OPEN rows; of `FIRST_ONES` and `RANDOM_ONES` at most as
  many as it commits.

Left out are requests whose GROUP has no bit in `groups`, prompts unless that is the bit of group 0 alone, those whose
step of the block has its bit in MARKS, unless the step is `marked`, and those whose window has more than `tokens`.
With `holds`, those who have decided nothing so far (STEP is 0) are left out, too, as long as a prompt is not written
that came with them: whose SERVED - PRIORITY is at most TOGETHER more. There is room for `sequences` windows, `tokens`
tokens, `rows` rows to decide and `extents` extents of keys. Who decides comes first, in the order of SERVED - PRIORITY,
then of rows of the table, up to the first one that does not fit. Then come prompts, in the same order, as far as whole
blocks fit, up to the first one that is served in part. If the first prompt's SERVED - PRIORITY is PATIENCE turns ago,
an eighth of the tokens, a block at least, is kept for prompts. Turns are counted by SERVED, whose largest is the last
turn: whoever decides gets the next one, and a prompt keeps the turn in which it came.

Windows stand in this order, but for those over packed keys (`PACKED`): whoever computes the whole span, over itself alone, sees 0
keys, and stands before all others.

Window i is of row[i] of the table, begins at begin[i] and sees the first seen[i] keys. cu_seqlens, cu_rows and cu_extents say
where its tokens, rows to decide and extents begin. Beyond the last window row is -1 and windows are empty.
"""

from typing import Final

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Operator
from mosaic.registrar.request_table import COLUMNS

PATIENCE: Final = 8
"""Turns after which a prompt has room kept for it."""
TOGETHER: Final = 8
"""Turns within which requests come together: many that are sent at once do not arrive between the same two steps."""
KEPT_SHARE: Final = 8
"""The room that is kept then: the tokens of the step divided by this."""

OPERATOR = Operator(
    name="pack_requests",
    operands=f"""
        table!@:i64[S, {COLUMNS}] room@:i64[1, 8]
        -> row:i64[sequences] begin:i32[sequences] seen:i32[sequences]
        cu_seqlens:i32[sequences+1] cu_rows:i32[sequences+1] cu_extents:i32[sequences+1]
    """,
    attrs="sequences",
    implementations=kernels_of("pack_requests"),
)
