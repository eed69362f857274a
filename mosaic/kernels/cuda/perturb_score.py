"""perturb_score on CUDA: Gumbel noise on the scores of rows, so that the highest k are k draws without replacement.

Legend: M rows.
"""

from typing import Final

from torch import Tensor

from mosaic.kernels.cuda.shared.launching import tl, triton
from mosaic.kernels.cuda.shared.sampling import exponential, gumbel, row_word

ROWS: Final = 256  # untuned default


@triton.jit(do_not_specialize=["count"])
def perturb_score_kernel(score, keys, temperature, count, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = row < count
    heat = tl.load(temperature + row, mask=mask, other=0.0)
    noise = gumbel(exponential(row_word(3, tl.load(keys + row, mask=mask, other=0))))
    warm = heat > 0.0
    tl.store(score + row, tl.load(score + row, mask=warm, other=0.0) / tl.where(warm, heat, 1.0) + noise, mask=warm)


def launch(*, score: Tensor, keys: Tensor, temperature: Tensor, scratch: Tensor | None = None) -> None:
    """Perturb score [M] in place."""
    count = score.shape[0]
    perturb_score_kernel[(triton.cdiv(count, ROWS),)](score, keys, temperature, count, BLOCK=ROWS, num_warps=4)
