"""y[T, F] = silu(h @ gate.T) * (h @ up.T) with h = rms_norm(x[T, D]): all at once, for few rows."""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, require
from mosaic.registrar.operators.norm_qkv import normed_tiles, require_norm, require_weight
from mosaic.registrar.tiles import Tile, Tiled, Tiles


def infer(x: Spec, norm: Spec, gate: Spec, up: Spec, *, eps: float) -> tuple[Spec]:
    require_norm(x, norm)
    require_weight("gate", x, gate)
    require(gate == up, f"gate and up must agree in shape and dtype, not {gate}, {up}")
    return (Spec((x.shape[0], gate.shape[0]), x.dtype),)


def flops(x: Spec, norm: Spec, gate: Spec, up: Spec, *, eps: float) -> Dim:
    return 4 * x.elements * gate.shape[0]


def columns(x: Spec, norm: Spec, gate: Spec, up: Spec, *, eps: float) -> Dim:
    return 2 * gate.shape[0]


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    return Tile((specs["x"].shape[0], specs["gate"].shape[0]), specs["x"].dtype), *normed_tiles(specs["x"])


OPERATOR = Operator(
    name="norm_gate_up",
    reads=("x", "norm", "gate", "up"),
    writes=("y",),
    infer=infer,
    flops=flops,
    rate="few_rows",
    rate_columns=columns,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.norm_gate_up", scratch=Tiled(tiles)),
        Implementation(name="triton", backend="cuda", kernel="mosaic.kernels.cuda.norm_gate_up"),
    ),
    roles={"y": "ffn"},
)
