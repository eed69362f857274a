"""x[C, D] = uncond + (guidance + 1) * (x - uncond), in place, in float32: classifier-free guidance of hidden rows.

The head is linear, so guiding the hidden rows is guiding their logits (LLaDA: u + (w + 1)(c - u)). `guidance`[C] is read
on the device; 0 leaves the conditional rows.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Operator, Specs
from mosaic.registrar.tiles import TILE_ROWS, Tile, Tiles, compute_dtype


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    (rows, width), compute = specs["x"].shape, compute_dtype(specs["x"].dtype)
    scales = Tile((1,), compute), Tile((rows, 1), compute)
    return scales if compute == specs["x"].dtype else (*scales, *(Tile((TILE_ROWS, width), compute),) * 2)


OPERATOR = Operator(
    name="guide",
    operands="x!:a[C, D] uncond:a[C, D] guidance:f32[C]",
    flops="3*x",
    implementations=kernels_of("guide", tiles=tiles),
    roles={"x": "logits and head", "uncond": "logits and head"},
)
