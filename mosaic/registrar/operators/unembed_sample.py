"""The statistics and samples of `row_sample` for x[C, D] @ weight[V, D].T, kept online per vocabulary tile."""

from typing import Final

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Attrs, Dim, Operator, Specs
from mosaic.registrar.operators import unembed_stats
from mosaic.registrar.operators.row_sample import DRAWN, SAMPLED, SAMPLES
from mosaic.registrar.tiles import Tiles, sample_tiles


def tiles(specs: Specs, attrs: Attrs) -> Tiles:
    return *unembed_stats.tiles(specs, attrs), *sample_tiles(specs["x"].shape[0], specs["weight"].shape[0])


SAMPLED_PARTIAL_BYTES: Final = 32
"""Bytes of a partial with a sample: an int32 token and two float32 more."""


def partials(specs: Specs, attrs: Attrs) -> Dim:
    """Reserve partial statistics and samples, as in `unembed_stats`."""
    return unembed_stats.partial_rows(specs["x"].shape[0]) * SAMPLED_PARTIAL_BYTES


OPERATOR = Operator(
    name="unembed_sample",
    operands=f"x:a[C, D] weight:a[V, D] {DRAWN} -> {SAMPLES}",
    flops="2*x*V",
    rate="sampled_unembed",
    implementations=kernels_of("unembed_sample", tiles=tiles, scratch=partials, invariant=False),
    roles={**dict.fromkeys(SAMPLED, "statistics"), "x": "logits and head"},
)
