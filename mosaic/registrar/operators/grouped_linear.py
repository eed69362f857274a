"""y[R, O] = x[R, I] @ weight[e].T for the rows of each expert e; offsets[E+1] bounds the runs."""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Implementation, Operator, Specs
from mosaic.registrar.tiles import Tiled, Tiles, linear_tiles


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    return linear_tiles(specs["x"].dtype)


OPERATOR = Operator(
    name="grouped_linear",
    operands="x:a[R, I] weight:a[E, O, I] offsets:i64[E+1] -> y:a[R, O]",
    flops="2*R*I*O",
    rate="gemm",
    rate_rows="R/E",
    rate_columns="O",
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.grouped_linear", scratch=Tiled(tiles)),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.grouped_linear"),
    ),
    roles={"x": "ffn", "y": "ffn"},
)
