"""x[C, D] = uncond + (guidance + 1) * (x - uncond), in place, in float32: classifier-free guidance of hidden rows.

The head is linear, so guiding the hidden rows is guiding their logits (LLaDA: u + (w + 1)(c - u)). `guidance`[1] is read
on the device; 0 leaves the conditional rows.
"""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, require
from mosaic.registrar.tiles import TILE_ROWS, Tile, Tiled, Tiles, compute_dtype


def infer(x: Spec, uncond: Spec, guidance: Spec) -> tuple[()]:
    require(
        len(x.shape) == 2 and x == uncond, f"x and uncond must be matrices of one shape and dtype, not {x} and {uncond}"
    )
    require(guidance == Spec((1,), "float32"), "guidance must be float32[1]")
    return ()


def flops(x: Spec, uncond: Spec, guidance: Spec) -> Dim:
    return 3 * x.elements


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    (_, width), compute = specs["x"].shape, compute_dtype(specs["x"].dtype)
    constants = Tile((2,), compute)
    return (constants,) if compute == specs["x"].dtype else (constants, *(Tile((TILE_ROWS, width), compute),) * 2)


OPERATOR = Operator(
    name="guide",
    reads=("x", "uncond", "guidance"),
    updates=("x",),
    whole=frozenset({"guidance"}),
    infer=infer,
    flops=flops,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.guide", scratch=Tiled(tiles)),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.guide"),
    ),
    roles={"x": "logits and head", "uncond": "logits and head"},
)
