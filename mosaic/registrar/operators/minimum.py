"""y = min(x, other): numbers that the host gives, held to what the device has computed."""

from __future__ import annotations

from mosaic.registrar.operator import Implementation, Operator, Spec, require


def infer(x: Spec, other: Spec) -> tuple[Spec]:
    require(len(x.shape) == 1 and x.dtype == "int32", f"x must be int32[B], not {x}")
    require(other == x, f"other must be {x} as x is, not {other}")
    return (x,)


OPERATOR = Operator(
    name="minimum",
    reads=("x", "other"),
    writes=("y",),
    infer=infer,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.minimum"),
        Implementation(name="cuda", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.minimum"),
    ),
)
