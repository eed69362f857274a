"""y[T, O] = x[T, I] @ weight[O, I].T (+ bias[O])."""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, require
from mosaic.registrar.tiles import Tiled, Tiles, linear_tiles


def infer(x: Spec, weight: Spec, bias: Spec | None = None) -> tuple[Spec]:
    require(len(weight.shape) == 2 and x.shape[-1] == weight.shape[1], f"weight must be [out, {x.shape[-1]}]")
    require(bias is None or bias.shape == (weight.shape[0],), f"bias must be [{weight.shape[0]}]")
    return (Spec((*x.shape[:-1], weight.shape[0]), x.dtype),)


def flops(x: Spec, weight: Spec, bias: Spec | None = None) -> Dim:
    return 2 * x.elements * weight.shape[0]


def columns(x: Spec, weight: Spec, bias: Spec | None = None) -> Dim:
    return weight.shape[0]


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    return linear_tiles(specs["x"].dtype)


OPERATOR = Operator(
    name="linear",
    reads=("x", "weight", "bias?"),
    writes=("y",),
    infer=infer,
    flops=flops,
    rate="gemm",
    rate_columns=columns,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.linear", scratch=Tiled(tiles)),
        Implementation(name="cublas", backend="cuda", kernel="mosaic.kernels.cuda.linear"),
        Implementation(
            name="invariant",
            backend="cuda",
            kernel="mosaic.kernels.cuda.invariant_linear",
            invariant=True,
            on_request=True,
        ),
    ),
)
