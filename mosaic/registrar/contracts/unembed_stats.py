"""The statistics of `row_stats` for x[C, D] @ weight[V, D].T, kept online per vocabulary tile: logits never exist."""

from __future__ import annotations

from mosaic.registrar.contract import Contract, Dim, Spec, require
from mosaic.registrar.contracts.row_stats import STATISTICS, statistics


def infer(x: Spec, weight: Spec) -> tuple[Spec, ...]:
    require(len(weight.shape) == 2 and x.shape[-1] == weight.shape[1], f"weight must be [vocabulary, {x.shape[-1]}]")
    return statistics(x.shape[0])


def flops(x: Spec, weight: Spec) -> Dim:
    return 2 * x.elements * weight.shape[0]


CONTRACT = Contract(
    name="unembed_stats", reads=("x", "weight"), writes=STATISTICS, infer=infer, flops=flops, rate="unembed"
)
