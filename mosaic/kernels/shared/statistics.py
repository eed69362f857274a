"""Row statistics of logits, kept online over tiles of the vocabulary: shared by the kernels of statistics and samples.

The state of a row lives in the outputs: `maximum` m, `second` largest, `token`, `logsumexp` holding l = sum exp(x - m)
and `entropy` holding w = sum exp(x - m)(x - m) until `finish` turns them into m + log l and log l - w / l (natural
logarithm). All in float32. Ties go to the lower index; two equal largest logits give second = maximum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mosaic.kernels.shared.sampling import RowSamples
from mosaic.kernels.shared.scratch import beginning, tiles_of

# exp(-87) is 1.6e-38 in float32: a logit this far below the maximum adds nothing; -inf would give 0 * -inf = NaN in the
# entropy. Lower ones have exponentials that are no normal numbers, which take forty times as long; these become 0.
_FLOOR = -87.0
_NOTHING = 1.7e-38
# A tile of nothing but -inf is measured from the lowest finite number instead of from -inf - -inf = NaN.
_LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStatistics:
    """The five outputs [C] of some rows, the scratch tiles to update them, and the rows' samples where any are drawn."""

    token: Tensor
    maximum: Tensor
    second: Tensor
    logsumexp: Tensor
    entropy: Tensor
    tiles: list[Tensor]
    samples: RowSamples | None = None

    @classmethod
    def with_samples(
        cls, kernel: str, scratch: Tensor | None, reads: dict[str, Tensor], *, keys: Tensor,
        temperature: Tensor, sample: Tensor, sample_logit: Tensor, **outputs: Tensor,
    ) -> RowStatistics:  # fmt: skip
        """Check the operands of a sampling kernel but for what it `reads`, and start on its scratch."""
        drawn = {"keys": keys, "temperature": temperature, "sample": sample, "sample_logit": sample_logit}
        tiles = tiles_of(kernel, scratch, reads)
        return cls(**outputs, tiles=tiles, samples=RowSamples.over(tiles, **drawn))

    def rows(self, start: int, end: int) -> RowStatistics:
        """View the rows [start, end)."""
        mine = slice(start, end)
        return RowStatistics(
            token=self.token[mine],
            maximum=self.maximum[mine],
            second=self.second[mine],
            logsumexp=self.logsumexp[mine],
            entropy=self.entropy[mine],
            tiles=self.tiles,
            samples=None if self.samples is None else self.samples.rows(start, end),
        )

    def update(self, logits_CV: Tensor, first_column: int, exponentials_CV: Tensor) -> None:
        """Take in a tile of logits, float32, the columns from `first_column` on; tiles come in ascending order.

        `exponentials_CV` is written; it may be the logits themselves, which are then lost.
        """
        if self.samples is not None:
            self.samples.update(logits_CV, first_column)
        rows, columns = logits_CV.shape
        work_CV = beginning(self.tiles[1], (rows, columns))
        top, runner_up, shift, scale, total, weighted, index, better = (tile[:rows] for tile in self.tiles[2:10])
        base = self.tiles[10]
        torch.max(logits_CV, dim=1, out=(top, index))
        work_CV.copy_(logits_CV)
        work_CV.scatter_(1, index.unsqueeze(1), float("-inf"))
        torch.amax(work_CV, dim=1, out=runner_up)
        index.add_(base.fill_(first_column))
        if first_column == 0:
            self.maximum.copy_(top)
            self.second.copy_(runner_up)
            self.token.copy_(index)
        else:
            torch.gt(top, self.maximum, out=better)  # strictly: a tie keeps the earlier column
            torch.where(better, index, self.token, out=self.token)
            torch.maximum(runner_up, self.second, out=self.second)
            torch.minimum(top, self.maximum, out=runner_up)
            torch.maximum(runner_up, self.second, out=self.second)
            scale.copy_(self.maximum)  # the old maximum
            torch.maximum(top, self.maximum, out=self.maximum)
            top.copy_(self.maximum)
        top.clamp_(min=_LOWEST)
        torch.sub(logits_CV, top.unsqueeze(1), out=work_CV)
        work_CV.clamp_(min=_FLOOR)
        torch.threshold_(torch.exp(work_CV, out=exponentials_CV), _NOTHING, 0.0)
        torch.sum(exponentials_CV, dim=1, out=total)
        work_CV.mul_(exponentials_CV)
        torch.sum(work_CV, dim=1, out=weighted)
        if first_column == 0:
            self.logsumexp.copy_(total)
            self.entropy.copy_(weighted)
            return
        torch.sub(scale, top, out=shift)
        shift.clamp_(min=_FLOOR)
        torch.exp(shift, out=scale)
        self.entropy.addcmul_(self.logsumexp, shift).mul_(scale).add_(weighted)
        self.logsumexp.mul_(scale).add_(total)

    def finish(self) -> None:
        """Turn the sums into log-sum-exp and entropy."""
        if self.samples is not None:
            self.samples.finish(self.token, self.maximum)
        torch.div(self.entropy, self.logsumexp, out=self.entropy)
        self.logsumexp.log_()
        torch.sub(self.logsumexp, self.entropy, out=self.entropy)
        self.logsumexp.add_(self.maximum)


def statistics_reference(logits_CV: Tensor) -> dict[str, Tensor]:
    """Return the five statistics of whole rows of logits, in plain PyTorch."""
    maximum = logits_CV.amax(dim=1)
    order = torch.arange(logits_CV.shape[1])
    token = torch.where(logits_CV == maximum[:, None], order, logits_CV.shape[1]).amin(dim=1)
    others = logits_CV.clone().scatter_(1, token[:, None], float("-inf"))
    logsumexp = torch.logsumexp(logits_CV, dim=1)
    probability = (logits_CV - logsumexp[:, None]).exp()
    entropy = -torch.xlogy(probability, probability).sum(dim=1)
    return {
        "token": token,
        "maximum": maximum,
        "second": others.amax(dim=1),
        "logsumexp": logsumexp,
        "entropy": entropy,
    }
