"""y[T, O] += x[T, I] @ weight[O, I].T, split over I: few rows would otherwise leave most of a GPU idle.

`arrivals` are 0 before and after: counters of the splits, see `mosaic.registrar.few_rows`.
"""

from typing import Final

from mosaic.registrar.few_rows import partial_floats, require_arrivals, split_count, tile_count
from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Specs
from mosaic.registrar.operators.linear import tiles

PROGRAMS: Final = 160
"""Programs that fill a GPU that runs one per multiprocessor."""


def rules(*, N: Dim, A: Dim, **_: object) -> None:
    require_arrivals(A, tile_count(N))


def partials(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve the partial sums of the splits."""
    outer, inner = specs["weight"].shape
    count = tile_count(outer)
    return 4 * partial_floats(count, split_count(count, inner, PROGRAMS))


OPERATOR = Operator(
    name="split_linear_add",
    operands="x:a[T, I] weight:a[N, I] y!:a[T, N] arrivals!@:i32[A]",
    rules=rules,
    flops="2*x*N",
    moved={"arrivals": "0"},
    rate="few_rows",
    rate_columns="N",
    implementations=kernels_of("split_linear_add", tiles=tiles, scratch=partials, invariant=False),
    roles={"y": "hidden"},
)
