"""score[M] = score / temperature[M] + Gumbel noise of keys[M], in place; as it is in rows whose temperature is 0.

The highest k results are k draws without replacement from softmax(score / temperature): Dream's `alg_temp`.
Source: Kool et al. 2019, "Stochastic Beams and Where to Find Them" (the Gumbel-top-k trick).
"""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Operator, Specs
from mosaic.registrar.tiles import ROW_NUMBERS, SCORE_ROWS, Tile, Tiles


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    rows = Tile((SCORE_ROWS,), "float32")
    return rows, rows, Tile((SCORE_ROWS,), "bool"), *ROW_NUMBERS


OPERATOR = Operator(
    name="perturb_score",
    operands="score!:f32[M] keys:i64[M] temperature:f32[M]",
    flops="4*score",
    implementations=kernels_of("perturb_score", tiles=tiles),
)
