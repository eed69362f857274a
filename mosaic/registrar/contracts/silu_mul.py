"""gate[T, F] = silu(gate) * up, in place."""

from __future__ import annotations

from mosaic.registrar.contract import Contract, Dim, Spec, require


def infer(gate: Spec, up: Spec) -> tuple[()]:
    require(gate == up, "gate and up must agree in shape and dtype")
    return ()


def flops(gate: Spec, up: Spec) -> Dim:
    return 5 * gate.elements


CONTRACT = Contract(name="silu_mul", reads=("gate", "up"), updates=("gate",), infer=infer, flops=flops)
