"""y = x: a second residual, and every transfer between device and pinned host memory (one of the two a host buffer)."""

from dataclasses import replace

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Operator

_CPU, _DRIVER = kernels_of("copy", cuda="driver")

OPERATOR = Operator(
    name="copy",
    operands="x:a[*T] -> y:a[*T]",
    implementations=(_CPU, replace(_DRIVER, on_host=frozenset({"x", "y"}))),
)
