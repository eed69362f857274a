"""gate[T, F] = silu(gate) * up, in place."""

from __future__ import annotations

from mosaic.registrar.operator import Dim, Implementation, Operator, Spec, require


def infer(gate: Spec, up: Spec) -> tuple[()]:
    require(gate == up, "gate and up must agree in shape and dtype")
    return ()


def flops(gate: Spec, up: Spec) -> Dim:
    return 5 * gate.elements


OPERATOR = Operator(
    name="silu_mul",
    reads=("gate", "up"),
    updates=("gate",),
    infer=infer,
    flops=flops,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.silu_mul"),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.silu_mul"),
    ),
    roles={"gate": "ffn", "up": "ffn"},
)
