"""The statistics of `row_stats` for logits[C, V], and a token of each row drawn from softmax(logits / temperature).

keys[C] are the rows' random keys, which the caller derives from seed, request, step and row; temperature[C] is read on
the device, so that one plan and one captured graph serve every temperature, and rows of several; 0 takes the argmax.
"""

from typing import Final

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Operator, Specs
from mosaic.registrar.operators.row_stats import STATISTICS, STATISTICS_OF_C
from mosaic.registrar.tiles import Tiles, sample_tiles, statistics_tiles

SAMPLED: Final = (*STATISTICS, "sample", "sample_logit")
DRAWN: Final = "keys:i64[C] temperature:f32[C]"
SAMPLES: Final = f"{STATISTICS_OF_C} sample:i64[C] sample_logit:f32[C]"


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    rows, vocabulary = specs["logits"].shape
    return *statistics_tiles(vocabulary), *sample_tiles(rows, vocabulary)


OPERATOR = Operator(
    name="row_sample",
    operands=f"logits:a[C, V] {DRAWN} -> {SAMPLES}",
    flops="10*logits",
    implementations=kernels_of("row_sample", tiles=tiles),
    roles={**dict.fromkeys(SAMPLED, "statistics"), "logits": "logits and head"},
)
