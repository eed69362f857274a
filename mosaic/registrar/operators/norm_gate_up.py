"""y[T, F] = silu(h @ gate.T) * (h @ up.T) with h = rms_norm(x[T, D]), in one launch, for few rows."""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Implementation, Operator, Specs
from mosaic.registrar.operators.norm_qkv import normed_tiles
from mosaic.registrar.tiles import Tile, Tiled, Tiles


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    return Tile((specs["x"].shape[0], specs["gate"].shape[0]), specs["x"].dtype), *normed_tiles(specs["x"])


OPERATOR = Operator(
    name="norm_gate_up",
    operands="x:a[T, D] norm:a[D] gate:a[F, D] up:a[F, D] -> y:a[T, F]",
    attrs="eps",
    flops="4*x*F",
    rate="few_rows",
    rate_columns="2*F",
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.norm_gate_up", scratch=Tiled(tiles)),
        Implementation(name="triton", backend="cuda", kernel="mosaic.kernels.cuda.norm_gate_up"),
    ),
    roles={"y": "ffn"},
)
