"""score[M] of each row from the outputs of `row_stats` or `row_sample`: rows are chosen by it, the highest first.

kind `confidence`: exp(sample_logit - logsumexp), the probability of the sample; `margin`: the argmax's probability
minus the runner-up's; `entropy`: -entropy; `random`: a number in (0, 1) from the row's key; `sequential`: -(row index).
Rows are never sliced: `sequential` counts them.
"""

from typing import Final

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Operator, Spec, Specs, require
from mosaic.registrar.tiles import ROW_NUMBERS, SCORE_ROWS, Tile, Tiles

KINDS: Final = ("confidence", "margin", "entropy", "random", "sequential")


def rules(*, kind: str, keys: Spec | None, **_: object) -> None:
    require(kind in KINDS, f"kind must be one of {', '.join(KINDS)}, not '{kind}'")
    require(keys is not None or kind != "random", "random scores need keys")


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    if attrs["kind"] == "random":
        return ROW_NUMBERS
    return (Tile((SCORE_ROWS,), "float32"),) if attrs["kind"] == "margin" else ()


OPERATOR = Operator(
    name="row_score",
    operands="""
        maximum@:f32[M] second@:f32[M] logsumexp@:f32[M] entropy@:f32[M] sample_logit@:f32[M] keys?@:i64[M] ->
        score:f32[M]
    """,
    attrs="kind",
    rules=rules,
    flops="4*M",
    implementations=kernels_of("row_score", tiles=tiles),
    roles={
        "maximum": "statistics",
        "second": "statistics",
        "logsumexp": "statistics",
        "entropy": "statistics",
        "sample_logit": "statistics",
        "score": "statistics",
    },
)
