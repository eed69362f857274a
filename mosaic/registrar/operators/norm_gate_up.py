"""y[T, F] = silu(h @ gate.T) * (h @ up.T) with h = rms_norm(x[T, D]), in one launch, for few rows."""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Operator, Specs
from mosaic.registrar.operators.norm_qkv import normed_tiles
from mosaic.registrar.tiles import Tile, Tiles


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    return Tile((specs["x"].shape[0], specs["gate"].shape[0]), specs["x"].dtype), *normed_tiles(specs["x"])


OPERATOR = Operator(
    name="norm_gate_up",
    operands="x:a[T, D] norm:a[D] gate:a[F, D] up:a[F, D] -> y:a[T, F]",
    attrs="eps",
    flops="4*x*F",
    rate="few_rows",
    rate_columns="2*F",
    implementations=kernels_of("norm_gate_up", tiles=tiles, invariant=False),
    roles={"y": "ffn"},
)
