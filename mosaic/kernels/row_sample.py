"""row_sample: the statistics of row_stats, and a token of each row drawn from softmax(logits / temperature).

A sample is a function of its row's logits, key and temperature: never of chunks, tiles or where the row stands.
Legend: C rows, V vocabulary.
"""

from functools import partial

import torch
from torch import Tensor

from mosaic.kernels.row_stats import take_in
from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.sampling import exponentials
from mosaic.kernels.shared.statistics import RowStatistics, statistics_reference


def bind(
    *, logits: Tensor, keys: Tensor, temperature: Tensor, token: Tensor, maximum: Tensor, second: Tensor,
    logsumexp: Tensor, entropy: Tensor, sample: Tensor, sample_logit: Tensor, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write the statistics and the samples of the rows of logits [C, V]."""
    state = RowStatistics.with_samples(
        "row_sample", scratch, {"logits": logits}, keys=keys, temperature=temperature, sample=sample,
        sample_logit=sample_logit, token=token, maximum=maximum, second=second, logsumexp=logsumexp, entropy=entropy,
    )  # fmt: skip
    return partial(take_in, logits, state)


launch = launcher(bind)


def reference(*, logits: Tensor, keys: Tensor, temperature: Tensor) -> dict[str, Tensor]:
    """Return the statistics and the samples in plain PyTorch; E is float32, whatever the dtype."""
    score = logits - temperature[:, None] * exponentials(keys, logits.shape[1]).to(logits.dtype).log()
    order = torch.arange(logits.shape[1])
    sample = torch.where(score == score.amax(dim=1)[:, None], order, logits.shape[1]).amin(dim=1)
    sample_logit = logits.gather(1, sample[:, None])[:, 0]
    return statistics_reference(logits) | {"sample": sample, "sample_logit": sample_logit}
