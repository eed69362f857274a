"""x[C, D] = uncond + (guidance + 1) * (x - uncond), in place, in float32: classifier-free guidance of hidden rows.

The head is linear, so guiding the hidden rows is guiding their logits (LLaDA: u + (w + 1)(c - u)). `guidance`[C] is read
on the device; 0 leaves the conditional rows.
"""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Implementation, Operator, Specs
from mosaic.registrar.tiles import TILE_ROWS, Tile, Tiled, Tiles, compute_dtype


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    (rows, width), compute = specs["x"].shape, compute_dtype(specs["x"].dtype)
    scales = Tile((1,), compute), Tile((rows, 1), compute)
    return scales if compute == specs["x"].dtype else (*scales, *(Tile((TILE_ROWS, width), compute),) * 2)


OPERATOR = Operator(
    name="guide",
    operands="x!:a[C, D] uncond:a[C, D] guidance:f32[C]",
    flops="3*x",
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.guide", scratch=Tiled(tiles)),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.guide"),
    ),
    roles={"x": "logits and head", "uncond": "logits and head"},
)
