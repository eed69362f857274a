"""q, k and v[T, ...] = rms_norm(x[T, D]) @ weight.T (+ bias): norm and three projections in one launch, for few rows.

`arrivals` are 0 before and after: counters of the splits, see `mosaic.registrar.few_rows`.
"""

from typing import Final

from mosaic.registrar.few_rows import partial_floats, require_arrivals, split_count, tile_count
from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Spec, Specs, require
from mosaic.registrar.tiles import Tile, Tiles, linear_tiles, norm_tiles, tiles_bytes

PROGRAMS: Final = 384
"""Programs that fill a GPU that runs three per multiprocessor."""


def rules(
    *, Q: Dim, W: Dim, A: Dim, q_bias: Spec | None, k_bias: Spec | None, v_bias: Spec | None, **_: object
) -> None:
    require(len({bias is None for bias in (q_bias, k_bias, v_bias)}) == 1, "there are three biases or none")
    require_arrivals(A, tile_count(Q, W, W))


def normed_tiles(x: Spec) -> Tiles:
    """List the normed rows, and the scratch of the norm and of the products, in bytes."""
    rows, width = x.shape
    norm, product = norm_tiles(rows, 1, width, x.dtype), linear_tiles(x.dtype)
    return Tile((rows, width), x.dtype), *(Tile((tiles_bytes(tiles),), "uint8") for tiles in (norm, product))


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    return normed_tiles(specs["x"])


def partials(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve the partial sums of the splits."""
    count = tile_count(*(specs[f"{name}_weight"].shape[0] for name in "qkv"))
    return 4 * partial_floats(count, split_count(count, specs["x"].shape[1], PROGRAMS))


OPERATOR = Operator(
    name="norm_qkv",
    operands="""
        x:a[T, D] norm:a[D] q_weight:a[Q, D] k_weight:a[W, D] v_weight:a[W, D] arrivals!@:i32[A] q_bias?:a[Q]
        k_bias?:a[W] v_bias?:a[W] -> q:a[T, Q] k:a[T, W] v:a[T, W]
    """,
    attrs="eps",
    rules=rules,
    flops="2*x*Q + 4*x*W",
    moved={"arrivals": "0"},
    rate="few_rows",
    rate_columns="Q + 2*W",
    implementations=kernels_of("norm_qkv", tiles=tiles, scratch=partials, invariant=False),
    roles={"q": "attention", "k": "attention", "v": "attention"},
)
