"""row_nucleus: a token of each row drawn from those within top-p and top-k.

In the order of the logits, the highest first, ties to the lower id, the first n tokens are kept: those before which the
softmax of logits / temperature has no more mass than top_p (1 and more: all), and no more than top_k (0 and less: all).
probability is the sample's, margin the first's less the second's (0 if there is none), entropy sum p log(p + 1e-10), of the
softmax over the kept. The sample is the argmax over the kept of row_sample's score, logit - temperature * log E; at
temperature 0 the first, with the softmax at 1. A row of nothing but -inf has token 0 and zeros. Source: Dream's
`sample_tokens`; there top-k keeps all tokens that tie with the k-th. Legend: C rows, V vocabulary.

Masses are added in float64 here and in float32 on a GPU, in other orders: a token that passes top_p by less than the rounding
of the sum, about 1e-6, may be kept by one and not by the other.
"""

import numpy as np
import torch
from torch import Tensor

from mosaic.kernels.shared.order import fill_order, indices_of
from mosaic.kernels.shared.sampling import exponentials, fill_exponentials
from mosaic.kernels.shared.scratch import tiles_of

_LOWEST = torch.finfo(torch.float32).min


def launch(
    *, logits: Tensor, keys: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, cuts: Tensor | None = None,
    sample: Tensor, probability: Tensor, margin: Tensor, entropy: Tensor, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the samples and the figures of the rows of logits [C, V], or of those that `cuts` names; settings are read here."""
    tiles = tiles_of("row_nucleus", scratch, {"logits": logits})
    settings = zip(temperature.tolist(), top_p.tolist(), top_k.tolist(), strict=True)
    outputs = [output.numpy() for output in (sample, probability, margin, entropy)]
    for row, own in enumerate(settings):
        if cuts is not None and not cuts[row]:
            continue
        results = _nucleus(logits[row], keys[row : row + 1], own, tiles)
        for output, result in zip(outputs, results, strict=True):
            output[row] = result


def _nucleus(
    logits_V: Tensor, key: Tensor, settings: tuple[float, float, int], tiles: list[Tensor]
) -> tuple[int, float, float, float]:
    (temperature, top_p, top_k), vocabulary = settings, logits_V.shape[0]
    values_V, order_V, weights_V, sums_V, constants, noise, *numbers = tiles
    constants[0].fill_(0.0)
    values_V.copy_(logits_V).add_(constants[0])  # -0.0 becomes 0.0
    order, values, weights, sums = (tile.numpy() for tile in (order_V, values_V, weights_V, sums_V))
    fill_order(order, weights.view(np.int32), values)
    order.sort()
    columns = indices_of(order)
    np.take(values, columns, out=weights, mode="clip")  # any other mode allocates
    top, scale = max(float(weights[0]), _LOWEST), temperature if temperature > 0.0 else 1.0
    constants[0].fill_(top)
    constants[1].fill_(scale)
    weights_V.sub_(constants[0]).div_(constants[1]).exp_()
    np.cumsum(weights, dtype=np.float64, out=sums)
    count = vocabulary
    if top_p < 1.0:  # the mass before a token is the sum up to the one before it
        count = min(count, 1 + int(np.searchsorted(sums, max(top_p, 0.0) * sums[-1], side="right")))
    if top_k > 0:
        count = min(count, top_k)
    total = max(float(sums[count - 1]), 1.0)  # at least the first's own 1
    first, second = float(weights[0]) / total, float(weights[1]) / total if count > 1 else 0.0
    chances, logarithms = weights[:count], sums[:count]
    np.divide(chances, np.float32(total), out=chances)
    np.add(chances, 1e-10, out=logarithms)
    np.log(logarithms, out=logarithms)
    entropy = float(np.multiply(logarithms, chances, out=logarithms).sum())
    if temperature <= 0.0:
        return int(columns[0]), first, first - second, entropy
    score_V = noise[0, :vocabulary]
    fill_exponentials(noise, key, 0, numbers)
    score_V.log_().neg_().mul_(constants[1]).add_(values_V)
    score, kept = score_V.numpy(), values[:count]
    np.take(score, columns[:count], out=kept, mode="clip")
    score.fill(-np.inf)
    score[columns[:count]] = kept
    sample = int(score.argmax())
    chance = float(np.exp((np.float32(float(logits_V[sample])) - np.float32(top)) / np.float32(scale))) / total
    return sample, chance, first - second, entropy


def reference(
    *, logits: Tensor, keys: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, cuts: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the samples and the figures from whole sorted rows, in plain PyTorch; E is float32, whatever the dtype."""
    heat, limit, few, vocabulary = temperature[:, None], top_p[:, None], top_k[:, None], logits.shape[1]
    ordered, columns = torch.sort(logits, dim=1, descending=True, stable=True)
    chance = torch.softmax(ordered / torch.where(heat > 0, heat, 1.0), dim=1)
    before = chance.cumsum(dim=1) - chance
    kept = (before <= limit.clamp(min=0.0)) | (limit >= 1.0)
    kept &= (torch.arange(vocabulary) < few) | (few <= 0)
    kept[:, 0] = True
    chance = torch.where(kept, chance, 0.0)
    chance /= chance.sum(dim=1, keepdim=True)
    in_place = torch.zeros_like(chance).scatter(1, columns, chance)
    score = logits - heat * exponentials(keys, vocabulary).to(logits.dtype).log()
    score.masked_fill_(~torch.zeros_like(kept).scatter(1, columns, kept), float("-inf"))
    sample = torch.where(temperature > 0, score.argmax(dim=1), columns[:, 0])
    second = chance[:, 1] if vocabulary > 1 else torch.zeros_like(chance[:, 0])
    return {
        "sample": sample,
        "probability": in_place.gather(1, sample[:, None])[:, 0],
        "margin": chance[:, 0] - second,
        "entropy": (chance * (chance + 1e-10).log()).sum(dim=1),
    }
