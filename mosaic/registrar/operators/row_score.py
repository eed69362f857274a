"""score[M] of each row from the outputs of `row_stats` or `row_sample`: by what rows are chosen, higher first.

kind `confidence`: exp(sample_logit - logsumexp), the probability of the sample; `margin`: that of the argmax less that of
the runner-up; `entropy`: -entropy; `random`: a number in (0, 1) of the row's key; `sequential`: -(row index). Rows are
never sliced: `sequential` counts them.
"""

from __future__ import annotations

from typing import Final

from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, require
from mosaic.registrar.tiles import ROW_NUMBERS, SCORE_ROWS, Tile, Tiled, Tiles

KINDS: Final = ("confidence", "margin", "entropy", "random", "sequential")


def infer(
    maximum: Spec,
    second: Spec,
    logsumexp: Spec,
    entropy: Spec,
    sample_logit: Spec,
    keys: Spec | None = None,
    *,
    kind: str,
) -> tuple[Spec]:
    require(kind in KINDS, f"kind must be one of {', '.join(KINDS)}, not '{kind}'")
    require(
        len(maximum.shape) == 1 and maximum.dtype == "float32", f"maximum must be a vector of float32, not {maximum}"
    )
    others = {"second": second, "logsumexp": logsumexp, "entropy": entropy, "sample_logit": sample_logit}
    for name, spec in others.items():
        require(spec == maximum, f"{name} must be {maximum} as maximum is, not {spec}")
    require(keys is not None or kind != "random", "random scores need keys")
    require(keys in (None, Spec(maximum.shape, "int64")), f"keys must be int64[{maximum.shape[0]}], one for each row")
    return (maximum,)


def flops(maximum: Spec, **_: object) -> Dim:
    return 4 * maximum.elements


READS: Final = ("maximum", "second", "logsumexp", "entropy", "sample_logit", "keys")


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    if attrs["kind"] == "random":
        return ROW_NUMBERS
    return (Tile((SCORE_ROWS,), "float32"),) if attrs["kind"] == "margin" else ()


OPERATOR = Operator(
    name="row_score",
    reads=(*READS[:-1], "keys?"),
    writes=("score",),
    whole=frozenset(READS),
    infer=infer,
    flops=flops,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.row_score", scratch=Tiled(tiles)),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.row_score"),
    ),
    roles={
        "maximum": "statistics",
        "second": "statistics",
        "logsumexp": "statistics",
        "entropy": "statistics",
        "sample_logit": "statistics",
        "score": "statistics",
    },
)
