"""y[C, D] = x[rows]: hidden states of the rows that will be unembedded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mosaic.registrar.contract import Contract, Dim, Spec, require


def infer(x: Spec, rows: Spec) -> tuple[Spec]:
    require(len(rows.shape) == 1 and rows.dtype in ("int64", "int32"), "rows must be a vector of int64 or int32")
    return (Spec((rows.shape[0], *x.shape[1:]), x.dtype),)


def bytes_moved(specs: Mapping[str, Spec], attrs: Mapping[str, Any]) -> Dim:
    return specs["rows"].bytes + 2 * specs["y"].bytes


CONTRACT = Contract(
    name="gather_rows",
    reads=("x", "rows"),
    writes=("y",),
    whole=frozenset({"x"}),
    infer=infer,
    bytes_moved=bytes_moved,
    rate_rows=lambda x, rows: rows.shape[0],
)
