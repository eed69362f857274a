"""x[T, N*H] = per-head RMSNorm with weight[H], in place (query and key norms)."""

from __future__ import annotations

from mosaic.registrar.contract import Contract, Dim, Spec, require


def infer(x: Spec, weight: Spec, *, heads: int, eps: float) -> tuple[()]:
    require(x.shape[-1] == heads * weight.shape[0], f"x must have {heads} heads of {weight.shape[0]}")
    return ()


def flops(x: Spec, weight: Spec, *, heads: int, eps: float) -> Dim:
    return 4 * x.elements


CONTRACT = Contract(name="head_norm", reads=("x", "weight"), updates=("x",), infer=infer, flops=flops)
