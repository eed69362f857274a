"""Router of a mixture of experts: softmax in float32 over weight[E, D], then the top k, optionally renormalised.

scores[C, k] in the activation dtype, experts[C, k] as int64.
"""

from __future__ import annotations

from mosaic.registrar.contract import Contract, Dim, Spec, require


def infer(x: Spec, weight: Spec, *, top_k: int, normalize: bool) -> tuple[Spec, Spec]:
    require(weight.shape[1] == x.shape[-1], f"weight must be [experts, {x.shape[-1]}]")
    require(bool(0 < top_k <= weight.shape[0]), f"top_k must be in 1..{weight.shape[0]}, got {top_k}")
    shape = (x.shape[0], top_k)
    return Spec(shape, x.dtype), Spec(shape, "int64")


def flops(x: Spec, weight: Spec, *, top_k: int, normalize: bool) -> Dim:
    return 2 * x.elements * weight.shape[0]


CONTRACT = Contract(
    name="moe_route", reads=("x", "weight"), writes=("scores", "experts"), infer=infer, flops=flops, rate="gemm"
)
