"""A token of each row of logits[C, V], sampled from those within top-p and top-k, with statistics of their softmax.

Tokens are ordered by logit, the highest first, ties to the lower id. `top_p`[C] keeps the tokens before which there is no
more than so much probability of softmax(logits / temperature): those up to the one that passes it (1 and more: all);
`top_k`[C] the first `top_k` of them (0: all). Of the kept, renormalised: `probability` of the sample, `margin` of the first and
the second, and `entropy`, negative as Dream's: sum p log(p + 1e-10). temperature[C] 0 takes the argmax, with the softmax
at 1. keys[C] as in `row_sample`, whose noise this is. Of rows whose `cuts`[C] is 0 nothing is written.
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
        logits:a[C, V] keys:i64[C] temperature:f32[C] top_p:f32[C] top_k:i32[C] cuts?:u8[C] -> sample:i64[C]
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
