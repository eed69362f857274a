"""What `evict_tokens` goes by of requests of a table, found where they stand.

row and cu_seqlens are those of `pack_requests`, positions those of `place_requests`. Window i is of the request row[i], whose
column `own` is its row of `state` [E, 4]: a sum and a count (`evict_tokens`), the positions of its block up to the rightmost that
a step of the block has kept, and the tokens that its last step decided, or -2 if `evict_tokens` has counted these. This operator
writes the -2: a step whose outcome is not taken runs again, and counts nothing then.

A step of a block counts from its first one on; where `first_step` is "prefill", from the second one on in a block with
tokens of the prompt. Let n be the steps before it that count, -1 in such a prefill.

- first[i] is where the block begins, owner[i] its row of the state.
- listed[i] lists offsets from there, then -1: of all positions of the block, or with `importance` "masked" of those where the
  canvas has nothing. votes[t] says whether a token is at such a position.
- status[t] of tokens at positions of the block where the canvas has nothing: 1 below those that were kept, of which there are
  `processed` before the first step; else 2; 0 of others, and in a prefill, or where n is 0 and `first_step` "whole".
- progress[i] is the number of positions that were kept, or with `reach` "step" 0.
- decoded[i] is -1 if no step of the request has counted, or with `history` "block" none of the block; else as the state has it.

A request whose column `own` is -1 evicts nothing: all but `first` is as of an empty window. Of empty windows owner
and first are 0, listed and progress too, and decoded is -2; of tokens behind the last window all is 0.
"""

from typing import Final

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Operator, require
from mosaic.registrar.operators.evict_tokens import HISTORIES
from mosaic.registrar.request_table import COLUMNS

IMPORTANCES: Final = ("block", "masked")
FIRST_STEPS: Final = ("evicts", "whole", "prefill")
REACHES: Final = ("block", "step")


def rules(*, importance: str, first_step: str, reach: str, history: str, own: int, **_: object) -> None:
    for what, value, known in (
        ("importance", importance, IMPORTANCES),
        ("first_step", first_step, FIRST_STEPS),
        ("reach", reach, REACHES),
        ("history", history, HISTORIES),
    ):
        require(value in known, f"{what} must be one of {', '.join(known)}, not '{value}'")
    require(0 <= own < COLUMNS, f"own must be a column of the table, not {own}")


OPERATOR = Operator(
    name="focus_requests",
    operands=f"""
        table@:i64[S, {COLUMNS}] canvas@:i64[R] state!@:f32[E, 4] row@:i64[B] cu_seqlens@:i32[B+1] positions@:i32[T]
        -> first:i32[B] listed:i32[B, block] votes:u8[T] status:u8[T] progress:i32[B] decoded:i32[B] owner:i64[B]
    """,
    attrs="own block processed importance first_step reach history",
    rules=rules,
    moved={"canvas": "B*block", "state": "2*B"},
    implementations=kernels_of("focus_requests"),
    roles={"votes": "statistics", "status": "statistics"},
)
