"""Row statistics of logits, kept online over tiles of the vocabulary: shared by row_stats and unembed_stats.

The state of a row is maximum m, second largest, token, l = sum exp(x - m) and w = sum exp(x - m)(x - m), all float32;
in the end logsumexp = m + log l and entropy = log l - w / l (natural logarithm). Ties go to the lower index; two equal
largest logits give second = maximum. Two numbers recur: -200, since exp(-200) is 0 in float32 while -inf would give
0 * -inf = NaN; and the lowest finite number, from which a tile of nothing but -inf is measured.
"""

from __future__ import annotations

from mosaic.kernels.cuda._triton import tl, triton

__all__ = ["absorb", "finish"]


@triton.jit
def absorb(logits, column, maximum, second, token, total, weighted):
    """Take in a tile [C, V] of float32 logits, -inf where masked; tiles come in ascending order of columns [V]."""
    tile_maximum = tl.max(logits, 1)
    at_maximum = logits == tile_maximum[:, None]
    tile_token = tl.min(tl.where(at_maximum, column[None, :], 0x7FFFFFFF), 1)
    rest = tl.where(column[None, :] == tile_token[:, None], float("-inf"), logits)
    second = tl.maximum(tl.minimum(tile_maximum, maximum), tl.maximum(tl.max(rest, 1), second))
    token = tl.where(tile_maximum > maximum, tile_token, token)  # strictly: a tie keeps the earlier column
    new_maximum = tl.maximum(tile_maximum, maximum)
    base = tl.maximum(new_maximum, -3.4028234663852886e38)
    shifted = tl.maximum(logits - base[:, None], -200.0)
    exponential = tl.exp(shifted)
    shift = tl.maximum(maximum - base, -200.0)
    scale = tl.exp(shift)
    weighted = (weighted + total * shift) * scale + tl.sum(exponential * shifted, 1)
    total = total * scale + tl.sum(exponential, 1)
    return new_maximum, second, token, total, weighted


@triton.jit
def finish(maximum, total, weighted):
    """Turn the sums into log-sum-exp and entropy."""
    log_total = tl.log(total)
    return maximum + log_total, log_total - weighted / total
