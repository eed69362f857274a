"""y = x: a second residual, and every transfer between device and pinned host memory (one of the two a host buffer)."""

from __future__ import annotations

from mosaic.registrar.operator import Implementation, Operator, Spec


def infer(x: Spec) -> tuple[Spec]:
    return (x,)


OPERATOR = Operator(
    name="copy",
    reads=("x",),
    writes=("y",),
    infer=infer,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.copy"),
        Implementation(
            name="driver",
            backend="cuda",
            invariant=True,
            kernel="mosaic.kernels.cuda.copy",
            on_host=frozenset({"x", "y"}),
        ),
    ),
)
