"""y[T, D] = table[ids]: token ids to hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mosaic.registrar.contract import Contract, Dim, Spec, require


def infer(ids: Spec, table: Spec) -> tuple[Spec]:
    require(len(ids.shape) == 1 and ids.dtype in ("int64", "int32"), "ids must be a vector of int64 or int32")
    require(len(table.shape) == 2, "the table must be [vocabulary, hidden]")
    return (Spec((ids.shape[0], table.shape[1]), table.dtype),)


def bytes_moved(specs: Mapping[str, Spec], attrs: Mapping[str, Any]) -> Dim:
    """Only the gathered rows of the table are read."""
    return specs["ids"].bytes + 2 * specs["y"].bytes


CONTRACT = Contract(name="embedding", reads=("ids", "table"), writes=("y",), infer=infer, bytes_moved=bytes_moved)
