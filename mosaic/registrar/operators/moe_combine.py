"""x[order // k] += scores[order] * y: expert outputs weighted and added to the residual rows they came from."""

from __future__ import annotations

from typing import Final

from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, require
from mosaic.registrar.tiles import Tile, Tiled, Tiles, compute_dtype


def infer(y: Spec, order: Spec, scores: Spec, x: Spec) -> tuple[()]:
    require(y.shape[-1] == x.shape[-1], f"y must be [assignments, {x.shape[-1]}]")
    require(scores.elements == order.shape[0] == y.shape[0], "y, order and scores must count the same assignments")
    return ()


def flops(y: Spec, order: Spec, scores: Spec, x: Spec) -> Dim:
    return 2 * y.elements


ROWS: Final = 128
"""Assignments that are added at a time."""


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    (assignments,), (_, width), dtype = specs["order"].shape, specs["x"].shape, specs["x"].dtype
    indices, compute = Tile((assignments,), "int64"), compute_dtype(dtype)
    own = (indices, indices, Tile((ROWS,), "int64"), Tile((ROWS, width), dtype))
    if compute == dtype:
        return own
    wide = Tile((ROWS, width), compute)
    return (*own, wide, wide, Tile((ROWS,), compute))


INVERSE_BYTES: Final = 4


def inverse(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve the inverse of `order`, so that each row gathers its own outputs."""
    return specs["order"].shape[0] * INVERSE_BYTES


OPERATOR = Operator(
    name="moe_combine",
    reads=("y", "order", "scores", "x"),
    updates=("x",),
    infer=infer,
    flops=flops,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.moe_combine", scratch=Tiled(tiles)),
        Implementation(
            name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.moe_combine", scratch=inverse
        ),
    ),
    roles={"x": "hidden"},
)
