"""The statistics and samples of `row_sample` for x[C, D] @ weight[V, D].T, kept online per vocabulary tile."""

from __future__ import annotations

from typing import Final

from mosaic.registrar.operator import Attrs, Dim, Implementation, Operator, Specs
from mosaic.registrar.operators import unembed_stats
from mosaic.registrar.operators.row_sample import DRAWN, SAMPLED, SAMPLES
from mosaic.registrar.tiles import Tiled, Tiles, sample_tiles


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
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.unembed_sample", scratch=Tiled(tiles)),
        Implementation(name="triton", backend="cuda", kernel="mosaic.kernels.cuda.unembed_sample", scratch=partials),
    ),
    roles={**dict.fromkeys(SAMPLED, "statistics"), "x": "logits and head"},
)
