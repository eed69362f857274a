"""Statistics of each row of logits[C, V]: argmax, maximum, second largest, log-sum-exp, entropy."""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs
from mosaic.registrar.tiles import Tiled, Tiles, statistics_tiles

STATISTICS = ("token", "maximum", "second", "logsumexp", "entropy")


def statistics(rows: Dim) -> tuple[Spec, ...]:
    """Return the five per-row statistics every sampler is built from; the argmax takes the lower index on ties."""
    return (Spec((rows,), "int64"), *(Spec((rows,), "float32") for _ in STATISTICS[1:]))


def infer(logits: Spec) -> tuple[Spec, ...]:
    return statistics(logits.shape[0])


def flops(logits: Spec) -> Dim:
    return 6 * logits.elements


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    return statistics_tiles(specs["logits"].shape[1])


OPERATOR = Operator(
    name="row_stats",
    reads=("logits",),
    writes=STATISTICS,
    infer=infer,
    flops=flops,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.row_stats", scratch=Tiled(tiles)),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.row_stats"),
    ),
    roles={**dict.fromkeys(STATISTICS, "statistics"), "logits": "logits and head"},
)
