"""y[M] = exp(maximum - logsumexp): the probability of the argmax, LLaDA's low-confidence score."""

from __future__ import annotations

from mosaic.registrar.operator import Implementation, Operator

OPERATOR = Operator(
    name="confidence",
    operands="maximum:a[*M] logsumexp:a[*M] -> y:a[*M]",
    flops="2*maximum",
    implementations=(
        Implementation(name="cpu", backend="cpu", kernel="mosaic.kernels.confidence"),
        Implementation(name="triton", backend="cuda", invariant=True, kernel="mosaic.kernels.cuda.confidence"),
    ),
    roles={"maximum": "statistics", "logsumexp": "statistics", "y": "statistics"},
)
