"""Router of a mixture of experts: scores in float32 of x @ weight[E, D].T, the top k of them, as weights.

scores[C, k] in the activation dtype, experts[C, k] as int64. A score is the softmax over the experts, or the sigmoid of
each. Experts are chosen by score + bias[E], where there is one, and weighed by the score alone. With `groups` of
consecutive experts, only those of the `top_groups` groups are chosen from whose two best sum up highest. The weights
are divided by their sum if `normalize`, then multiplied by `scale`.
"""

from __future__ import annotations

from typing import Final

from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, divides, require
from mosaic.registrar.tiles import Tile, Tiled, Tiles, compute_dtype


def infer(
    x: Spec,
    weight: Spec,
    bias: Spec | None = None,
    *,
    top_k: int,
    normalize: bool,
    scoring: str = "softmax",
    groups: int = 0,
    top_groups: int = 0,
    scale: float = 1.0,
) -> tuple[Spec, Spec]:
    experts = weight.shape[0]
    require(weight.shape[1] == x.shape[-1], f"weight must be [experts, {x.shape[-1]}]")
    require(bool(0 < top_k <= experts), f"top_k must be in 1..{experts}, got {top_k}")
    require(scoring in ("softmax", "sigmoid"), f"scoring must be softmax or sigmoid, got '{scoring}'")
    if bias is not None:
        require(bias == Spec((experts,), "float32"), f"bias must be float32[{experts}], it is {bias}")
    if groups:
        require(divides(groups, experts), f"{experts} experts do not divide into {groups} groups")
        require(bool(2 * groups <= experts), f"groups of {experts // groups} expert have no two best")
        held = top_groups * (experts // groups)
        require(0 < top_groups <= groups, f"top_groups must be in 1..{groups}, got {top_groups}")
        require(bool(held >= top_k), f"{top_groups} groups hold {held} experts, top_k is {top_k}")
    else:
        require(top_groups == 0, f"top_groups is {top_groups}, but there are no groups")
    shape = (x.shape[0], top_k)
    return Spec(shape, x.dtype), Spec(shape, "int64")


def flops(x: Spec, weight: Spec, bias: Spec | None = None, **_: object) -> Dim:
    return 2 * x.elements * weight.shape[0]


ROWS: Final = 256
"""Rows that are scored at a time."""


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    experts, inner = specs["weight"].shape
    compute = compute_dtype(specs["x"].dtype)
    own: Tiles = (
        Tile((ROWS, experts), compute),
        Tile((ROWS,), compute),
        Tile((ROWS,), "int64"),
        Tile((ROWS, attrs["top_k"]), compute),
    )
    if "bias" in specs or attrs.get("groups"):
        own = (*own, Tile((ROWS, experts), compute))
    if groups := attrs.get("groups"):
        best = Tile((ROWS, groups), compute)
        own = (*own, best, best, Tile((ROWS, groups), "int64"))
    if compute == specs["x"].dtype:
        return own
    return (*own, Tile((ROWS, inner), compute), Tile((experts, inner), compute))


LOGIT_BYTES: Final = 4


def logits(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve the logits in float32, which one launch writes and the next chooses from."""
    return specs["x"].shape[0] * specs["weight"].shape[0] * LOGIT_BYTES


OPERATOR = Operator(
    name="moe_route",
    reads=("x", "weight", "bias?"),
    writes=("scores", "experts"),
    infer=infer,
    flops=flops,
    rate="gemm",
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.moe_route", scratch=Tiled(tiles)),
        Implementation(
            name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.moe_route", scratch=logits
        ),
    ),
    roles={"scores": "ffn", "experts": "ffn"},
)
