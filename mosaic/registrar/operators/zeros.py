"""y[count] = 0, int32: counters for the kernels that leave them so."""

from __future__ import annotations

from mosaic.registrar.operator import Implementation, Operator, Spec, require


def infer(*, count: int) -> tuple[Spec]:
    require(isinstance(count, int) and count >= 1, f"count must be an integer from 1, not {count}")
    return (Spec((count,), "int32"),)


OPERATOR = Operator(
    name="zeros",
    reads=(),
    writes=("y",),
    infer=infer,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.zeros"),
        Implementation(name="cuda", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.zeros"),
    ),
)
