"""x[order // k] += scores[order] * y: expert outputs, weighted and added to the residual rows that they belong to."""

from typing import Final

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Specs
from mosaic.registrar.tiles import Tile, Tiles, compute_dtype

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
    operands="y:a[C*K, D] order:i64[C*K] scores:a[C, K] x!:a[C, D]",
    flops="2*y",
    implementations=kernels_of("moe_combine", tiles=tiles, scratch=inverse),
    roles={"x": "hidden"},
)
