"""x[order // k] += scores[order] * y: expert outputs weighted and added to the residual rows they came from."""

from __future__ import annotations

from mosaic.registrar.contract import Contract, Dim, Spec, require


def infer(y: Spec, order: Spec, scores: Spec, x: Spec) -> tuple[()]:
    require(y.shape[-1] == x.shape[-1], f"y must be [assignments, {x.shape[-1]}]")
    require(scores.elements == order.shape[0] == y.shape[0], "y, order and scores must count the same assignments")
    return ()


def flops(y: Spec, order: Spec, scores: Spec, x: Spec) -> Dim:
    return 2 * y.elements


CONTRACT = Contract(name="moe_combine", reads=("y", "order", "scores", "x"), updates=("x",), infer=infer, flops=flops)
