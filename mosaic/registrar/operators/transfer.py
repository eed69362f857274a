"""Which rows are committed, by their scores: committed[M], and chosen[M], the token where committed and current elsewhere.

Sequence b has the rows [cu_rows[b], cu_rows[b + 1]); rows beyond cu_rows[B] are padding, never committed. Its candidates
are the rows whose `current` is `mask_id`, ordered by score, the highest first, ties to the lower row. No score is NaN.
`rule`, with the sequence's quota q (nothing below 0) and threshold t:

- `top`: the first q.
- `threshold`: those with score >= t, and the first whatever its score (Fast-dLLM v1).
- `dynamic`: those with score > t if they are q or more, else the first q (SDAR, LLaDA2).
- `above`: those with score > t, perhaps none.
- `factor`: t holds f >= 0. Of L candidates with scores c_1 >= c_2 >= ..., stop at the first n with c_n < t_n, t_1 = -1 and
  t_n = 1 - f / (n + 1), or else at the last; the n - 1 before it are committed, and one more where the stop is the first
  or the last (Fast-dLLM v1). In float32.
- `edit`: candidates as `dynamic`; of the other rows those with score > edit_threshold whose token is not `current`
  (LLaDA2.1).
"""

from __future__ import annotations

from typing import Final

from mosaic.registrar.operator import Attrs, Implementation, Operator, Spec, Specs, require
from mosaic.registrar.tiles import Tile, Tiled, Tiles

RULES: Final = ("top", "threshold", "dynamic", "above", "factor", "edit")
READS: Final = ("token", "score", "current", "cu_rows", "quota", "threshold", "edit_threshold")


def infer(
    token: Spec, score: Spec, current: Spec, cu_rows: Spec, quota: Spec, threshold: Spec, edit_threshold: Spec | None = None,
    *, rule: str, mask_id: int,
) -> tuple[Spec, Spec]:  # fmt: skip
    require(rule in RULES, f"rule must be one of {', '.join(RULES)}, not '{rule}'")
    require(len(token.shape) == 1 and token.dtype == "int64", f"token must be a vector of int64, not {token}")
    require(current == token, f"current must be {token} as token is, not {current}")
    require(score == Spec(token.shape, "float32"), f"score must be float32[{token.shape[0]}], not {score}")
    require(len(quota.shape) == 1 and quota.dtype == "int32", f"quota must be int32[sequences], not {quota}")
    seqs = quota.shape[0]
    require(cu_rows == Spec((seqs + 1,), "int32"), f"cu_rows must be int32[{seqs + 1}], not {cu_rows}")
    require(threshold == Spec((seqs,), "float32"), f"threshold must be float32[{seqs}], not {threshold}")
    wanted = threshold if rule == "edit" else None
    require(edit_threshold == wanted, f"rule '{rule}' takes edit_threshold {wanted}, not {edit_threshold}")
    return token, Spec(token.shape, "uint8")


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    rows = specs["score"].shape[0]
    return (Tile((rows,), "int64"), Tile((rows,), "float32"), Tile((rows,), "int32"), *(Tile((rows,), "bool"),) * 2)


OPERATOR = Operator(
    name="transfer",
    reads=(*READS[:-1], "edit_threshold?"),
    writes=("chosen", "committed"),
    whole=frozenset(READS),
    infer=infer,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.transfer", scratch=Tiled(tiles)),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.transfer"),
    ),
    roles={"token": "statistics", "score": "statistics", "chosen": "statistics", "committed": "statistics"},
)
