"""row_score: the scores by which rows are chosen, from their statistics.

score overlaps no operand. Legend: M rows.
"""

from typing import Final

import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.sampling import fill_uniforms, uniforms
from mosaic.kernels.shared.scratch import tiles_of

KINDS: Final = ("confidence", "margin", "entropy", "random", "sequential")


def bind(
    *, maximum: Tensor, second: Tensor, logsumexp: Tensor, entropy: Tensor, sample_logit: Tensor, score: Tensor,
    kind: str, keys: Tensor | None = None, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write the scores [M] of one kind."""
    tiles = tiles_of("row_score", scratch, {}, kind=kind)

    def run() -> None:
        if kind == "random" and keys is not None:
            fill_uniforms(score, keys, tiles)
        elif kind == "confidence":
            torch.sub(sample_logit, logsumexp, out=score).exp_()
        elif kind == "margin":
            torch.sub(maximum, logsumexp, out=score).exp_()
            step = tiles[0].shape[0]
            for start in range(0, score.shape[0], step):
                part = score[start : start + step]
                other = tiles[0][: part.shape[0]]
                torch.sub(second[start : start + step], logsumexp[start : start + step], out=other)
                part.sub_(other.exp_())
        elif kind == "entropy":
            torch.neg(entropy, out=score)
        else:
            torch.arange(0, -score.shape[0], -1, out=score)

    return run


launch = launcher(bind)


def reference(
    *, maximum: Tensor, second: Tensor, logsumexp: Tensor, entropy: Tensor, sample_logit: Tensor, kind: str,
    keys: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the scores in plain PyTorch; random ones are float32 numbers, whatever the dtype."""
    if kind == "random" and keys is not None:
        return uniforms(keys).to(maximum.dtype)
    if kind == "sequential":
        return -torch.arange(maximum.shape[0], dtype=maximum.dtype)
    if kind == "entropy":
        return -entropy
    first = (sample_logit if kind == "confidence" else maximum) - logsumexp
    return first.exp() if kind == "confidence" else first.exp() - (second - logsumexp).exp()
