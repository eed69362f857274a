"""y[T, D] = x / sqrt(mean(x^2) + eps) * weight, in float32, cast back. y may overwrite x."""

from __future__ import annotations

from mosaic.registrar.contract import Contract, Dim, Spec, require


def infer(x: Spec, weight: Spec, *, eps: float) -> tuple[Spec]:
    require(weight.shape == (x.shape[-1],), f"the weight must have {x.shape[-1]} elements")
    return (x,)


def flops(x: Spec, weight: Spec, *, eps: float) -> Dim:
    return 4 * x.elements


CONTRACT = Contract(
    name="rms_norm", reads=("x", "weight"), writes=("y",), inplace=(("y", "x"),), infer=infer, flops=flops
)
