"""What the requests that a step serves reuse of attention to their prefixes, and which of them attend to theirs again (FlashBlock).

row is that of `pack_requests`; table[S, C] has a row a request. The windows are of blocks, none of a prompt. A request's prefix are
the START keys before its block. It refreshes in a block's first step, and after every `steps` steps of the block, if that is not 0.
For window i:

- kept_row[i] is its column `own`, the row of its outputs over the prefix;
- prefix[i] is START;
- refreshed[i] is START if it refreshes, or 0.

Beyond the last window everything is 0.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Operator, require
from mosaic.registrar.request_table import COLUMNS


def rules(*, own: int, steps: int, **_: object) -> None:
    require(0 <= own < COLUMNS, f"own must be a column of the {COLUMNS} of a request, not {own}")
    require(steps >= 0, f"steps must be those of a refresh, or 0 for all of a block, not {steps}")


OPERATOR = Operator(
    name="reuse_requests",
    operands=f"table@:i64[S, {COLUMNS}] row@:i64[B] -> kept_row:i64[B] prefix:i32[B] refreshed:i32[B]",
    attrs="own steps=0",
    rules=rules,
    implementations=kernels_of("reuse_requests"),
)
