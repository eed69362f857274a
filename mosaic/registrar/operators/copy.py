"""y = x: a second residual, and every transfer between device and pinned host memory (one of the two a host buffer)."""

from mosaic.registrar.operator import Implementation, Operator

OPERATOR = Operator(
    name="copy",
    operands="x:a[*T] -> y:a[*T]",
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
