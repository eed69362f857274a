"""score[M] = score / temperature + Gumbel noise of keys[M], in place; as it is where temperature[1] is 0.

The highest k of the outcome are k draws without replacement from softmax(score / temperature): Dream's `alg_temp`.
Source: Kool et al. 2019, "Stochastic Beams and Where to Find Them" (the Gumbel-top-k trick).
"""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, require
from mosaic.registrar.tiles import ROW_NUMBERS, SCORE_ROWS, Tile, Tiled, Tiles


def infer(score: Spec, keys: Spec, temperature: Spec) -> tuple[()]:
    require(len(score.shape) == 1 and score.dtype == "float32", f"score must be a vector of float32, not {score}")
    require(keys == Spec(score.shape, "int64"), f"keys must be int64[{score.shape[0]}], one for each row")
    require(temperature == Spec((1,), "float32"), "temperature must be float32[1]")
    return ()


def flops(score: Spec, keys: Spec, temperature: Spec) -> Dim:
    """Count a quotient, two logarithms and a sum."""
    return 4 * score.elements


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    return Tile((SCORE_ROWS,), "float32"), *ROW_NUMBERS


OPERATOR = Operator(
    name="perturb_score",
    reads=("score", "keys", "temperature"),
    updates=("score",),
    whole=frozenset({"temperature"}),
    infer=infer,
    flops=flops,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.perturb_score", scratch=Tiled(tiles)),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.perturb_score"),
    ),
)
