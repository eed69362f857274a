"""x[C, D] = uncond + (guidance + 1) * (x - uncond), in place, in float32: classifier-free guidance of hidden rows.

The head is linear, so guiding the hidden rows is guiding their logits (LLaDA: u + (w + 1)(c - u)). `guidance`[1] is read
on the device; 0 leaves the conditional rows.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Operator, Specs
from mosaic.registrar.tiles import TILE_ROWS, Tile, Tiles, compute_dtype


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    (_, width), compute = specs["x"].shape, compute_dtype(specs["x"].dtype)
    constants = Tile((2,), compute)
    return (constants,) if compute == specs["x"].dtype else (constants, *(Tile((TILE_ROWS, width), compute),) * 2)


OPERATOR = Operator(
    name="guide",
    operands="x!:a[C, D] uncond:a[C, D] guidance@:f32[1]",
    flops="3*x",
    implementations=kernels_of("guide", tiles=tiles),
    roles={"x": "logits and head", "uncond": "logits and head"},
)
