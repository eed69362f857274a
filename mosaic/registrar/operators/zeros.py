"""y[count] = 0, int32: counters, which kernels set back to 0."""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Operator, require


def rules(*, count: int, **_: object) -> None:
    require(isinstance(count, int) and count >= 1, f"count must be an integer from 1, not {count}")


OPERATOR = Operator(
    name="zeros",
    operands="-> y:i32[count]",
    attrs="count",
    rules=rules,
    implementations=kernels_of("zeros", cuda="cuda"),
)
