"""row_score on CUDA: the scores by which rows are chosen, from their statistics.

Legend: M rows.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import tl, triton
from mosaic.kernels.cuda.shared.sampling import row_word, uniform

ROWS: Final = 256  # untuned default


@triton.jit(do_not_specialize=["count"])
def row_score_kernel(
    maximum, second, logsumexp, entropy, sample_logit, keys, score, count, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = row < count
    if KIND == "confidence":
        value = tl.exp(tl.load(sample_logit + row, mask=mask) - tl.load(logsumexp + row, mask=mask))
    elif KIND == "margin":
        total = tl.load(logsumexp + row, mask=mask)
        value = tl.exp(tl.load(maximum + row, mask=mask) - total) - tl.exp(tl.load(second + row, mask=mask) - total)
    elif KIND == "entropy":
        value = -tl.load(entropy + row, mask=mask)
    elif KIND == "random":
        value = uniform(row_word(2, tl.load(keys + row, mask=mask)))
    else:
        value = (-row).to(tl.float32)
    tl.store(score + row, value, mask=mask)


def launch(
    *, maximum: Tensor, second: Tensor, logsumexp: Tensor, entropy: Tensor, sample_logit: Tensor, score: Tensor,
    kind: str, keys: Tensor | None = None, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the scores [M] of one kind."""
    figures = (maximum, second, logsumexp, entropy, sample_logit)
    count, stand_in = score.shape[0], maximum  # of keys that no kind but random has
    row_score_kernel[(triton.cdiv(count, ROWS),)](
        *figures, stand_in if keys is None else keys, score, count, KIND=kind, BLOCK=ROWS, num_warps=4
    )
