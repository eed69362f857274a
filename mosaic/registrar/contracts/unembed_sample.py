"""The statistics and samples of `row_sample` for x[C, D] @ weight[V, D].T, kept online per vocabulary tile."""

from __future__ import annotations

from mosaic.registrar.contract import Contract, Dim, Spec
from mosaic.registrar.contracts import unembed_stats
from mosaic.registrar.contracts.row_sample import SAMPLED, samples


def infer(x: Spec, weight: Spec, keys: Spec, temperature: Spec) -> tuple[Spec, ...]:
    unembed_stats.infer(x, weight)
    return samples(x.shape[0], keys, temperature)


def flops(x: Spec, weight: Spec, keys: Spec, temperature: Spec) -> Dim:
    return unembed_stats.flops(x, weight)


CONTRACT = Contract(
    name="unembed_sample",
    reads=("x", "weight", "keys", "temperature"),
    writes=SAMPLED,
    whole=frozenset({"temperature"}),
    infer=infer,
    flops=flops,
    rate="sampled_unembed",
)
