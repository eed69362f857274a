"""What a step has kept and decided of requests of a table, noted in the state of `focus_requests`.

row is that of `pack_requests`, `own` and the state are those of `focus_requests`, and seen is that of `evict_tokens`. cu_seqlens
and cu_rows are bounds of the kept rows and of those decided, committed[M] says which of these are taken. Of window i, unless it is
empty or a prefill that does not count, the state takes

- the positions of its block that were kept so far: seen[i] less where the block begins, if they are more than before;
- the tokens that were committed.

`advance_requests` runs behind it: the table is that of the step.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Operator, require
from mosaic.registrar.operators.focus_requests import FIRST_STEPS
from mosaic.registrar.request_table import COLUMNS


def rules(*, first_step: str, own: int, **_: object) -> None:
    require(first_step in FIRST_STEPS, f"first_step must be one of {', '.join(FIRST_STEPS)}, not '{first_step}'")
    require(0 <= own < COLUMNS, f"own must be a column of the table, not {own}")


OPERATOR = Operator(
    name="note_focus",
    operands=f"""
        table@:i64[S, {COLUMNS}] state!@:f32[E, 4] row@:i64[B] cu_seqlens@:i32[B+1] cu_rows@:i32[B+1] seen@:i32[B]
        committed@:u8[M]
    """,
    attrs="own processed first_step",
    rules=rules,
    moved={"state": "3*B"},
    implementations=kernels_of("note_focus"),
)
