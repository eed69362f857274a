"""y[M] = max(rows - 1, first row of the sequence): Dream's logit shift, done on indices (row i-1 predicts i)."""

from __future__ import annotations

from mosaic.registrar.contract import Contract, Spec, require


def infer(rows: Spec, cu_seqlens: Spec) -> tuple[Spec]:
    require(len(rows.shape) == 1, "rows must be a vector")
    return (rows,)


CONTRACT = Contract(name="shift_rows", reads=("rows", "cu_seqlens"), writes=("y",), infer=infer)
