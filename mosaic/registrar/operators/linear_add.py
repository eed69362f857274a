"""y[T, O] += x[T, I] @ weight[O, I].T: a projection accumulated into the residual stream."""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, require
from mosaic.registrar.tiles import Tiled, Tiles, linear_tiles


def infer(x: Spec, weight: Spec, y: Spec) -> tuple[()]:
    require(len(weight.shape) == 2 and x.shape[-1] == weight.shape[1], f"weight must be [out, {x.shape[-1]}]")
    require(y.shape == (*x.shape[:-1], weight.shape[0]), f"y must be [{x.shape[0]}, {weight.shape[0]}]")
    return ()


def flops(x: Spec, weight: Spec, y: Spec) -> Dim:
    return 2 * x.elements * weight.shape[0]


def columns(x: Spec, weight: Spec, y: Spec) -> Dim:
    return weight.shape[0]


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    return linear_tiles(specs["x"].dtype)


OPERATOR = Operator(
    name="linear_add",
    reads=("x", "weight", "y"),
    updates=("y",),
    infer=infer,
    flops=flops,
    rate="gemm",
    rate_columns=columns,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.linear_add", scratch=Tiled(tiles)),
        Implementation(name="cublas", backend="cuda", kernel="mosaic.kernels.cuda.linear_add"),
        Implementation(
            name="invariant",
            backend="cuda",
            kernel="mosaic.kernels.cuda.invariant_linear:launch_add",
            invariant=True,
            on_request=True,
        ),
    ),
    roles={"y": "hidden"},
)
