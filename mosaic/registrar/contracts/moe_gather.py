"""y[C*k, D] = x[order // k]: rows of x permuted to expert order."""

from __future__ import annotations

from mosaic.registrar.contract import Contract, Spec, require


def infer(x: Spec, order: Spec, *, top_k: int) -> tuple[Spec]:
    require(order.shape[0] == x.shape[0] * top_k, f"order must have {x.shape[0] * top_k} entries")
    return (Spec((order.shape[0], x.shape[1]), x.dtype),)


CONTRACT = Contract(name="moe_gather", reads=("x", "order"), writes=("y",), infer=infer)
