"""Router of a mixture of experts: scores in float32 of x @ weight[E, D].T, and the weights of the top k experts.

scores[C, k] in the activation dtype, experts[C, k] as int64. A score is the softmax over the experts, or the sigmoid of
each. Experts are chosen by score + bias[E], if there is a bias, and weighted by the score alone. With `groups` of
consecutive experts, they are chosen from the `top_groups` groups with the largest sum of their two best scores. The
weights are divided by their sum if `normalize`, then multiplied by `scale`.
"""

from typing import Final

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Specs, divides, require
from mosaic.registrar.tiles import Tile, Tiles, compute_dtype


def rules(*, E: Dim, top_k: int, scoring: str, groups: int, top_groups: int, **_: object) -> None:
    require(bool(0 < top_k <= E), f"top_k must be in 1..{E}, got {top_k}")
    require(scoring in ("softmax", "sigmoid"), f"scoring must be softmax or sigmoid, got '{scoring}'")
    if groups:
        require(divides(groups, E), f"{E} experts do not divide into {groups} groups")
        require(bool(2 * groups <= E), f"groups of {E // groups} expert have no two best")
        held = top_groups * (E // groups)
        require(0 < top_groups <= groups, f"top_groups must be in 1..{groups}, got {top_groups}")
        require(bool(held >= top_k), f"{top_groups} groups hold {held} experts, top_k is {top_k}")
    else:
        require(top_groups == 0, f"top_groups is {top_groups}, but there are no groups")


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
    """Reserve the logits in float32, which one launch writes and the next reads."""
    return specs["x"].shape[0] * specs["weight"].shape[0] * LOGIT_BYTES


OPERATOR = Operator(
    name="moe_route",
    operands="x:a[C, D] weight:a[E, D] bias?:f32[E] -> scores:a[C, top_k] experts:i64[C, top_k]",
    attrs="top_k normalize scoring='softmax' groups=0 top_groups=0 scale=1.0",
    rules=rules,
    flops="2*x*E",
    rate="gemm",
    implementations=kernels_of("moe_route", tiles=tiles, scratch=logits),
    roles={"scores": "ffn", "experts": "ffn"},
)
