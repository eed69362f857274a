"""unembed_sample: the statistics and samples of x @ weight.T, whose rows of logits never exist.

Tiles as in unembed_stats. Legend: C rows, D hidden, V vocabulary.
"""

from functools import partial

from torch import Tensor

from mosaic.kernels import row_sample
from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.statistics import RowStatistics
from mosaic.kernels.unembed_stats import multiply_in
from mosaic.registrar.tiles import SAMPLE_TILES


def bind(
    *,
    x: Tensor,
    weight: Tensor,
    keys: Tensor,
    temperature: Tensor,
    token: Tensor,
    maximum: Tensor,
    second: Tensor,
    logsumexp: Tensor,
    entropy: Tensor,
    sample: Tensor,
    sample_logit: Tensor,
    scratch: Tensor | None = None,
) -> Run:
    """Write the statistics and the samples of the logits of x [C, D] against weight [V, D]."""
    state = RowStatistics.with_samples(
        "unembed_sample", scratch, {"x": x, "weight": weight}, keys=keys, temperature=temperature, sample=sample,
        sample_logit=sample_logit, token=token, maximum=maximum, second=second, logsumexp=logsumexp, entropy=entropy,
    )  # fmt: skip
    return partial(multiply_in, x, weight, state, state.tiles[11:-SAMPLE_TILES])


launch = launcher(bind)


def reference(*, x: Tensor, weight: Tensor, keys: Tensor, temperature: Tensor) -> dict[str, Tensor]:
    """Return the statistics and the samples from whole rows of logits, in plain PyTorch."""
    return row_sample.reference(logits=x @ weight.T, keys=keys, temperature=temperature)
