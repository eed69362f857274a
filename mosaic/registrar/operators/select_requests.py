"""How the requests that a step serves attend to selected keys of their prefixes, and which of them select (MAGE).

row, seen and cu_seqlens are those of `pack_requests`, positions those of `place_requests`; table[S, C] has a row a request. The
windows are of blocks, none of a prompt. A request's prefix are the START keys before its block. It selects in step NUMBER of a
block if that bit of MARKS is set. If `carried`, it attends to the last block's selection in its first step, unless there is no last
block after PREFIX. For window i:

- owner[i] is its column `own`, the row of its selections;
- captured[i] is the prefix that the selection is of: START, or START - BLOCK if it attends to the last block's;
- candidates[i] is START if it selects, or 0;
- seen_exactly[i] is seen[i] if it selects and attends to no selection, or 0; seen_sparsely[i] is seen[i] if it does, or 0;
- cu_keys has the bounds of the seen keys;
- votes[t] says whether the token is at START or after it; with `answer` also at PROMPT or after it.

A request whose column `own` is -1 has no selections: it attends to all that it sees, and the rest is 0. Beyond the last
window everything is 0, and bounds do not grow.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Operator, require
from mosaic.registrar.request_table import COLUMNS


def rules(*, own: int, **_: object) -> None:
    require(0 <= own < COLUMNS, f"own must be a column of the {COLUMNS} of a request, not {own}")


OPERATOR = Operator(
    name="select_requests",
    operands=f"""
        table@:i64[S, {COLUMNS}] row@:i64[B] seen@:i32[B] cu_seqlens@:i32[B+1] positions@:i32[T]
        -> owner:i64[B] captured:i32[B] candidates:i32[B] seen_exactly:i32[B] seen_sparsely:i32[B] cu_keys:i32[B+1] votes:u8[T]
    """,
    attrs="own carried=False answer=False",
    rules=rules,
    implementations=kernels_of("select_requests"),
    roles={"votes": "statistics"},
)
