"""y[count] = 0, int32: counters, which kernels set back to 0."""

from __future__ import annotations

from mosaic.registrar.operator import Implementation, Operator, require


def rules(*, count: int, **_: object) -> None:
    require(isinstance(count, int) and count >= 1, f"count must be an integer from 1, not {count}")


OPERATOR = Operator(
    name="zeros",
    operands="-> y:i32[count]",
    attrs="count",
    rules=rules,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.zeros"),
        Implementation(name="cuda", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.zeros"),
    ),
)
