"""perturb_score: Gumbel noise on the scores of rows, so that the highest k are k draws without replacement.

Source: Kool et al. 2019. Legend: M rows.
"""

import torch
from torch import Tensor

from mosaic.kernels.shared.sampling import fill_gumbels, gumbels
from mosaic.kernels.shared.scratch import tiles_of


def launch(*, score: Tensor, keys: Tensor, temperature: Tensor, scratch: Tensor | None = None) -> None:
    """Perturb score [M] in place."""
    noise, divided, warm, *numbers = tiles_of("perturb_score", scratch, {"score": score})
    step = noise.shape[0]
    for start in range(0, score.shape[0], step):
        part, heat = score[start : start + step], temperature[start : start + step]
        mine, perturbed, drawn = (tile[: part.shape[0]] for tile in (noise, divided, warm))
        fill_gumbels(mine, keys[start : start + step], numbers)
        torch.div(part, heat, out=perturbed).add_(mine)
        torch.where(drawn.copy_(heat), perturbed, part, out=part)


def reference(*, score: Tensor, keys: Tensor, temperature: Tensor) -> Tensor:
    """Return the perturbed scores in plain PyTorch; the noise is float32, whatever the dtype."""
    return torch.where(temperature > 0, score / temperature + gumbels(keys).to(score.dtype), score)
