"""unembed_sample on CUDA: the statistics and samples of x @ weight.T, whose rows of logits never exist.

The kernels are those of unembed_stats; temperatures are read on the device. Legend: C rows, D hidden, V vocabulary.
"""

from torch import Tensor

from mosaic.kernels.cuda.unembed_stats import launch_unembedding


def launch(
    *, x: Tensor, weight: Tensor, keys: Tensor, temperature: Tensor, token: Tensor, maximum: Tensor, second: Tensor,
    logsumexp: Tensor, entropy: Tensor, sample: Tensor, sample_logit: Tensor, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the statistics and the samples of the logits of x [C, D] against weight [V, D]."""
    statistics, sampling = (token, maximum, second, logsumexp, entropy), (keys, temperature, sample, sample_logit)
    launch_unembedding("unembed_sample", x, weight, statistics, scratch, sampling)
