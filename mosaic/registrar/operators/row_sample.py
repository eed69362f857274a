"""The statistics of `row_stats` for logits[C, V], and a token of each row drawn from softmax(logits / temperature).

keys[C] are the rows' random keys, which the caller derives from seed, request, step and row; temperature[1] is read on
the device, so that one plan and one captured graph serve every temperature; 0 draws the argmax.
"""

from __future__ import annotations

from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Spec, Specs, require
from mosaic.registrar.operators.row_stats import STATISTICS, statistics
from mosaic.registrar.tiles import Tiled, Tiles, sample_tiles, statistics_tiles

SAMPLED = (*STATISTICS, "sample", "sample_logit")


def samples(rows: Dim, keys: Spec, temperature: Spec) -> tuple[Spec, ...]:
    """Return the specs of the statistics of `rows` rows, then of a sample of each and its logit."""
    require(keys == Spec((rows,), "int64"), f"keys must be int64[{rows}], one for each row")
    require(temperature == Spec((1,), "float32"), "temperature must be float32[1]")
    return (*statistics(rows), Spec((rows,), "int64"), Spec((rows,), "float32"))


def infer(logits: Spec, keys: Spec, temperature: Spec) -> tuple[Spec, ...]:
    return samples(logits.shape[0], keys, temperature)


def flops(logits: Spec, keys: Spec, temperature: Spec) -> Dim:
    """Count those of `row_stats`, and per logit two logarithms, a product and a sum; the random bits are integers."""
    return 10 * logits.elements


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    rows, vocabulary = specs["logits"].shape
    return *statistics_tiles(vocabulary), *sample_tiles(rows, vocabulary)


OPERATOR = Operator(
    name="row_sample",
    reads=("logits", "keys", "temperature"),
    writes=SAMPLED,
    whole=frozenset({"temperature"}),
    infer=infer,
    flops=flops,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.row_sample", scratch=Tiled(tiles)),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.row_sample"),
    ),
    roles={**dict.fromkeys(SAMPLED, "statistics"), "logits": "logits and head"},
)
