"""y[M] = exp(maximum - logsumexp): the probability of the argmax, LLaDA's low-confidence score."""

from __future__ import annotations

from mosaic.registrar.operator import Dim, Implementation, Operator, Spec, require


def infer(maximum: Spec, logsumexp: Spec) -> tuple[Spec]:
    require(maximum == logsumexp, "maximum and logsumexp must agree in shape and dtype")
    return (maximum,)


def flops(maximum: Spec, logsumexp: Spec) -> Dim:
    return 2 * maximum.elements


OPERATOR = Operator(
    name="confidence",
    reads=("maximum", "logsumexp"),
    writes=("y",),
    infer=infer,
    flops=flops,
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.confidence"),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.confidence"),
    ),
    roles={"maximum": "statistics", "logsumexp": "statistics", "y": "statistics"},
)
