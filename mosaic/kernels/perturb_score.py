"""perturb_score: Gumbel noise on the scores of rows, so that the highest k are k draws without replacement.

Source: Kool et al. 2019. Legend: M rows.
"""

from torch import Tensor

from mosaic.kernels.shared.sampling import fill_gumbels, gumbels
from mosaic.kernels.shared.scratch import tiles_of


def launch(*, score: Tensor, keys: Tensor, temperature: Tensor, scratch: Tensor | None = None) -> None:
    """Perturb score [M] in place."""
    noise, *numbers = tiles_of("perturb_score", scratch, {"score": score})
    if float(temperature) <= 0.0:
        return
    score.div_(temperature)
    for start in range(0, score.shape[0], noise.shape[0]):
        part = score[start : start + noise.shape[0]]
        mine = noise[: part.shape[0]]
        fill_gumbels(mine, keys[start : start + noise.shape[0]], numbers)
        part.add_(mine)


def reference(*, score: Tensor, keys: Tensor, temperature: Tensor) -> Tensor:
    """Return the perturbed scores in plain PyTorch; the noise is float32, whatever the dtype."""
    return score / temperature + gumbels(keys).to(score.dtype) if float(temperature) > 0 else score.clone()
