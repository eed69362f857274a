"""confidence: the softmax probability of the largest logit, exp(maximum - logsumexp).

Legend: M rows.
"""

import torch
from torch import Tensor


def launch(*, maximum: Tensor, logsumexp: Tensor, y: Tensor, scratch: Tensor | None = None) -> None:
    """Write exp(maximum - logsumexp) into y [M]."""
    torch.sub(maximum, logsumexp, out=y)
    y.exp_()


def reference(*, maximum: Tensor, logsumexp: Tensor) -> Tensor:
    """Return exp(maximum - logsumexp) in plain PyTorch."""
    return (maximum - logsumexp).exp()
