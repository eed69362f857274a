"""Statistics of each row of logits[C, V]: argmax, maximum, second largest, log-sum-exp, entropy."""

from typing import Final

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Operator, Specs
from mosaic.registrar.tiles import Tiles, statistics_tiles

STATISTICS: Final = ("token", "maximum", "second", "logsumexp", "entropy")
STATISTICS_OF_C: Final = "token:i64[C] maximum:f32[C] second:f32[C] logsumexp:f32[C] entropy:f32[C]"
"""The statistics that every sampler uses; the argmax takes the lower index on ties."""


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    return statistics_tiles(specs["logits"].shape[1])


OPERATOR = Operator(
    name="row_stats",
    operands=f"logits:a[C, V] -> {STATISTICS_OF_C}",
    flops="6*logits",
    implementations=kernels_of("row_stats", tiles=tiles),
    roles={**dict.fromkeys(STATISTICS, "statistics"), "logits": "logits and head"},
)
