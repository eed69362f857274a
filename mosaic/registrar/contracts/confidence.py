"""y[M] = exp(maximum - logsumexp): the probability of the argmax, LLaDA's low-confidence score."""

from __future__ import annotations

from mosaic.registrar.contract import Contract, Dim, Spec, require


def infer(maximum: Spec, logsumexp: Spec) -> tuple[Spec]:
    require(maximum == logsumexp, "maximum and logsumexp must agree in shape and dtype")
    return (maximum,)


def flops(maximum: Spec, logsumexp: Spec) -> Dim:
    return 2 * maximum.elements


CONTRACT = Contract(name="confidence", reads=("maximum", "logsumexp"), writes=("y",), infer=infer, flops=flops)
