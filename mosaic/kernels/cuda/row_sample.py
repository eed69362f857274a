"""row_sample on CUDA: the statistics of row_stats, and a token of each row drawn from softmax(logits / temperature).

The kernel is that of row_stats; temperatures are read on the device. Legend: C rows, V vocabulary.
"""

from torch import Tensor

from mosaic.kernels.cuda.row_stats import launch_rows


def launch(
    *, logits: Tensor, keys: Tensor, temperature: Tensor, token: Tensor, maximum: Tensor, second: Tensor,
    logsumexp: Tensor, entropy: Tensor, sample: Tensor, sample_logit: Tensor, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the statistics and the samples of the rows of logits [C, V]."""
    statistics = (token, maximum, second, logsumexp, entropy)
    launch_rows("row_sample", logits, statistics, (keys, temperature, sample, sample_logit))
