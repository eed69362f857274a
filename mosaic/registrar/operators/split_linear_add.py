"""y[T, O] += x[T, I] @ weight[O, I].T, split over I where few rows would leave most of a GPU idle.

`arrivals` are 0 before and after: `mosaic.registrar.few_rows` says what counts with them.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from mosaic.registrar.few_rows import bytes_moved, partial_floats, require_arrivals, split_count, tile_count
from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, require
from mosaic.registrar.tiles import Tiled, Tiles, linear_tiles

PROGRAMS: Final = 160
"""Enough for a GPU that runs one on each processor."""


def infer(x: Spec, weight: Spec, y: Spec, arrivals: Spec) -> tuple[()]:
    require(len(x.shape) == 2, f"x must be a matrix, not {x}")
    require(len(weight.shape) == 2 and weight.shape[1] == x.shape[1], f"weight must be [out, {x.shape[1]}]")
    require(y.shape == (x.shape[0], weight.shape[0]), f"y must be [{x.shape[0]}, {weight.shape[0]}]")
    require_arrivals(arrivals, tile_count(weight.shape[0]))
    return ()


def flops(x: Spec, weight: Spec, y: Spec, arrivals: Spec) -> Dim:
    return 2 * x.elements * weight.shape[0]


def columns(x: Spec, weight: Spec, y: Spec, arrivals: Spec) -> Dim:
    return weight.shape[0]


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    return linear_tiles(specs["x"].dtype)


def partials(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve what the splits leave."""
    outer, inner = specs["weight"].shape
    count = tile_count(outer)
    return 4 * partial_floats(count, split_count(count, inner, PROGRAMS))


OPERATOR = Operator(
    name="split_linear_add",
    reads=("x", "weight", "y", "arrivals"),
    updates=("y", "arrivals"),
    whole=frozenset({"arrivals"}),
    infer=infer,
    flops=flops,
    bytes_moved=partial(bytes_moved, updates="y"),
    rate="few_rows",
    rate_columns=columns,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.split_linear_add", scratch=Tiled(tiles)),
        Implementation(name="triton", backend="cuda", kernel="mosaic.kernels.cuda.split_linear_add", scratch=partials),
    ),
    roles={"y": "hidden"},
)
