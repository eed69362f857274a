"""q, k and v[T, ...] = rms_norm(x[T, D]) @ weight.T (+ bias): norm and the three projections of attention at once, for few rows.

`arrivals` are 0 before and after: `mosaic.registrar.few_rows` says what counts with them.
"""

from __future__ import annotations

from typing import Final

from mosaic.registrar.few_rows import bytes_moved, partial_floats, require_arrivals, split_count, tile_count
from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, require
from mosaic.registrar.tiles import Tile, Tiled, Tiles, linear_tiles, norm_tiles, tiles_bytes

PROGRAMS: Final = 384
"""Enough for a GPU that runs three on each processor."""


def infer(
    x: Spec, norm: Spec, q_weight: Spec, k_weight: Spec, v_weight: Spec, arrivals: Spec,
    q_bias: Spec | None = None, k_bias: Spec | None = None, v_bias: Spec | None = None, *, eps: float,
) -> tuple[Spec, Spec, Spec]:  # fmt: skip
    require_norm(x, norm)
    biases = {"q": q_bias, "k": k_bias, "v": v_bias}
    found = []
    for (name, bias), weight in zip(biases.items(), (q_weight, k_weight, v_weight), strict=True):
        require_weight(f"{name}_weight", x, weight)
        require(bias is None or bias.shape == weight.shape[:1], f"{name}_bias must be [{weight.shape[0]}]")
        found.append(Spec((*x.shape[:-1], weight.shape[0]), x.dtype))
    require(k_weight.shape == v_weight.shape, f"k_weight and v_weight must agree in shape, not {k_weight}, {v_weight}")
    require(len({bias is None for bias in biases.values()}) == 1, "there are three biases or none")
    require_arrivals(arrivals, tile_count(*(weight.shape[0] for weight in (q_weight, k_weight, v_weight))))
    return found[0], found[1], found[2]


def require_norm(x: Spec, norm: Spec) -> None:
    """Refuse what is no matrix, and a norm of another width."""
    require(len(x.shape) == 2, f"x must be a matrix, not {x}")
    require(norm.shape == (x.shape[1],), f"norm must have {x.shape[1]} elements")


def require_weight(name: str, x: Spec, weight: Spec) -> None:
    """Refuse a weight that does not multiply x."""
    require(len(weight.shape) == 2 and weight.shape[1] == x.shape[1], f"{name} must be [out, {x.shape[1]}]")


def columns(x: Spec, norm: Spec, q_weight: Spec, k_weight: Spec, v_weight: Spec, *_: object, **__: object) -> Dim:
    return q_weight.shape[0] + k_weight.shape[0] + v_weight.shape[0]


def flops(x: Spec, norm: Spec, q_weight: Spec, k_weight: Spec, v_weight: Spec, *_: object, **__: object) -> Dim:
    return 2 * x.elements * columns(x, norm, q_weight, k_weight, v_weight)


def normed_tiles(x: Spec) -> Tiles:
    """List the normed rows, and the scratch of the norm and of the products, in bytes."""
    rows, width = x.shape
    norm, product = norm_tiles(rows, 1, width, x.dtype), linear_tiles(x.dtype)
    return Tile((rows, width), x.dtype), *(Tile((tiles_bytes(tiles),), "uint8") for tiles in (norm, product))


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    return normed_tiles(specs["x"])


def partials(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve what the splits leave."""
    count = tile_count(*(specs[f"{name}_weight"].shape[0] for name in "qkv"))
    return 4 * partial_floats(count, split_count(count, specs["x"].shape[1], PROGRAMS))


OPERATOR = Operator(
    name="norm_qkv",
    reads=("x", "norm", "q_weight", "k_weight", "v_weight", "arrivals", "q_bias?", "k_bias?", "v_bias?"),
    writes=("q", "k", "v"),
    updates=("arrivals",),
    whole=frozenset({"arrivals"}),
    infer=infer,
    flops=flops,
    bytes_moved=bytes_moved,
    rate="few_rows",
    rate_columns=columns,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.norm_qkv", scratch=Tiled(tiles)),
        Implementation(name="triton", backend="cuda", kernel="mosaic.kernels.cuda.norm_qkv", scratch=partials),
    ),
    roles={"q": "attention", "k": "attention", "v": "attention"},
)
