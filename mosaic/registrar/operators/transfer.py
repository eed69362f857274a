"""Commit rows by their scores: committed[M], and chosen[M], the token of committed rows and `current` of others.

Sequence b has the rows [cu_rows[b], cu_rows[b + 1]); rows beyond cu_rows[B] are padding, never committed. Its candidates
are the rows whose `current` is `mask_id`, ordered by score, the highest first, ties to the lower row. No score is NaN.
`rule`, with the sequence's quota q (nothing below 0) and threshold t:

- `top`: the first q.
- `threshold`: those with score >= t, and the first whatever its score (Fast-dLLM v1).
- `dynamic`: those with score > t if they are q or more, else the first q (SDAR, LLaDA2).
- `above`: those with score > t, perhaps none.
- `factor`: t holds f >= 0. Of L candidates with scores c_1 >= c_2 >= ..., stop at the first n with c_n < t_n, t_1 = -1
  and t_n = 1 - f / (n + 1), or else at the last. The n - 1 before it are committed, and one if the stop is the first
  or the last (Fast-dLLM v1). In float32.
- `edit`: candidates as `dynamic`; of the other rows those with score > edit_threshold whose token is not `current`
  (LLaDA2.1).
"""

from typing import Final

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Operator, Spec, Specs, require
from mosaic.registrar.tiles import Tile, Tiles

RULES: Final = ("top", "threshold", "dynamic", "above", "factor", "edit")


def rules(*, rule: str, edit_threshold: Spec | None, **_: object) -> None:
    require(rule in RULES, f"rule must be one of {', '.join(RULES)}, not '{rule}'")
    require(
        (rule == "edit") == (edit_threshold is not None),
        f"rule 'edit' takes edit_threshold and others do not, not '{rule}'",
    )


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    rows = specs["score"].shape[0]
    return (Tile((rows,), "int64"), Tile((rows,), "float32"), Tile((rows,), "int32"), *(Tile((rows,), "bool"),) * 2)


OPERATOR = Operator(
    name="transfer",
    operands="""
        token@:i64[M] score@:f32[M] current@:i64[M] cu_rows@:i32[B+1] quota@:i32[B] threshold@:f32[B]
        edit_threshold?@:f32[B] -> chosen:i64[M] committed:u8[M]
    """,
    attrs="rule mask_id",
    rules=rules,
    implementations=kernels_of("transfer", tiles=tiles),
    roles={"token": "statistics", "score": "statistics", "chosen": "statistics", "committed": "statistics"},
)
