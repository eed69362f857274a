"""y[R, O] = x[R, I] @ weight[e].T for the rows of each expert e; offsets[E+1] bounds the runs."""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, exact, require
from mosaic.registrar.tiles import Tiled, Tiles, linear_tiles


def infer(x: Spec, weight: Spec, offsets: Spec) -> tuple[Spec]:
    require(len(weight.shape) == 3 and weight.shape[2] == x.shape[-1], f"weight must be [experts, out, {x.shape[-1]}]")
    require(offsets.shape == (weight.shape[0] + 1,), f"offsets must be [{weight.shape[0] + 1}]")
    return (Spec((x.shape[0], weight.shape[1]), x.dtype),)


def flops(x: Spec, weight: Spec, offsets: Spec) -> Dim:
    return 2 * x.elements * weight.shape[1]


def rows_per_expert(x: Spec, weight: Spec, offsets: Spec) -> Dim:
    """Return the average expert's rows: the rate is that of a GEMM with as many."""
    return exact(x.shape[0]) / weight.shape[0]


def columns(x: Spec, weight: Spec, offsets: Spec) -> Dim:
    return weight.shape[1]


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    return linear_tiles(specs["x"].dtype)


OPERATOR = Operator(
    name="grouped_linear",
    reads=("x", "weight", "offsets"),
    writes=("y",),
    infer=infer,
    flops=flops,
    rate="gemm",
    rate_rows=rows_per_expert,
    rate_columns=columns,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.grouped_linear", scratch=Tiled(tiles)),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.grouped_linear"),
    ),
    roles={"x": "ffn", "y": "ffn"},
)
