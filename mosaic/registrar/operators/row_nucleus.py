"""A token of each row of logits[C, V], sampled from those within top-p and top-k, with statistics of their softmax.

Tokens are ordered by logit, the highest first, ties to the lower id. `top_p`[1] keeps a token if the tokens before it
have at most that probability together, of softmax(logits / temperature) (1 or more: all); `top_k`[1] keeps the first
`top_k` (0: all). Over the kept tokens, renormalised: `probability` of the sample, `margin` between the first and
second, and `entropy`, negative as Dream's: sum p log(p + 1e-10). temperature[1] 0 takes the argmax, with the softmax at
1. keys[C] and the noise are those of `row_sample`.
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Operator, Specs
from mosaic.registrar.tiles import COUNTER_COLUMNS, COUNTERS, GROUP_RUN, Tile, Tiles


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    """List a row of logits, its order, its weights, their sums, and the random numbers of a row at once."""
    vocabulary = specs["logits"].shape[1]
    blocks = -(-vocabulary // COUNTER_COLUMNS)
    numbers, groups = Tile((1, blocks * COUNTER_COLUMNS), "float32"), Tile((blocks * COUNTERS // GROUP_RUN,), "float32")
    row, index = Tile((vocabulary,), "float32"), Tile((1,), "int64")
    own = row, Tile((vocabulary,), "int64"), row, Tile((vocabulary,), "float64"), Tile((2,), "float32"), numbers
    constants = Tile((10,), "int64"), Tile((5,), "float32")
    return *own, *constants, index, index, groups, groups, numbers, *(Tile((blocks * COUNTERS,), "int64"),) * 6


OPERATOR = Operator(
    name="row_nucleus",
    operands="""
        logits:a[C, V] keys:i64[C] temperature@:f32[1] top_p@:f32[1] top_k@:i32[1] -> sample:i64[C]
        probability:f32[C] margin:f32[C] entropy:f32[C]
    """,
    flops="10*logits",
    implementations=kernels_of("row_nucleus", tiles=tiles),
    roles={
        "sample": "statistics",
        "probability": "statistics",
        "margin": "statistics",
        "entropy": "statistics",
        "logits": "logits and head",
    },
)
