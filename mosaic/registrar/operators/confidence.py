"""y[M] = exp(maximum - logsumexp): the probability of the argmax, LLaDA's low-confidence score."""

from mosaic.registrar.kernels import kernels_of
from mosaic.registrar.operator import Operator

OPERATOR = Operator(
    name="confidence",
    operands="maximum:a[*M] logsumexp:a[*M] -> y:a[*M]",
    flops="2*maximum",
    implementations=kernels_of("confidence"),
    roles={"maximum": "statistics", "logsumexp": "statistics", "y": "statistics"},
)
