"""x[T, N*H] = per-head RMSNorm with weight[H], in place (query and key norms)."""

from __future__ import annotations

from mosaic.registrar.contract import Contract, Dim, Spec, divides, require


def infer(x: Spec, weight: Spec, *, eps: float) -> tuple[()]:
    size = weight.shape[0]
    require(divides(size, x.shape[-1]), f"x must have heads of {size}, it has {x.shape[-1]} columns")
    return ()


def flops(x: Spec, weight: Spec, *, eps: float) -> Dim:
    return 4 * x.elements


CONTRACT = Contract(name="head_norm", reads=("x", "weight"), updates=("x",), infer=infer, flops=flops)
