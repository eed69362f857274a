"""prefix_attention on CUDA: softmax(q k^T * scale) v per sequence over kept keys, and the log-sum-exp of each row's scores.

These are the kernels of `kv_attention`: whatever writes a row of y has its maximum and its sum, and writes their logarithm
too. Legend: T query rows, R rows, L layers, B sequences, X extents, N query heads, K KV heads, H size.
"""

from functools import partial
from typing import Any

from torch import Tensor

from mosaic.kernels.cuda import kv_attention


def launch(*, q: Tensor, y: Tensor, logsumexp: Tensor, scratch: Tensor | None = None, **given: Any) -> None:
    """Write the attention of the query rows into y [T, N*H], and the log-sum-exps of their scores into logsumexp [T, N]."""
    kv_attention.launch(q=q, y=y, logsumexp=logsumexp, scratch=scratch, **given)


launch_invariant = partial(launch, fixed=True)
