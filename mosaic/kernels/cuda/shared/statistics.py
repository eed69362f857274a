"""Row statistics of logits, kept online over tiles of the vocabulary: shared by the kernels of statistics and samples.

The state of a row is maximum m, second largest, l = sum 2^(z - b) and w = sum 2^(z - b)(z - b) for the logits z and the
maximum b in units of log 2, where one fused multiply-add and one instruction make an exponential, all float32; in the
end logsumexp = m + log l and entropy = log l - w log 2 / l (natural logarithm). Ties go to the lower index; two equal
largest logits give second = maximum. Two numbers recur: -200, since 2^-200 is 0 in float32 while -inf would give
0 * -inf = NaN; and -1e38, from which a tile of nothing but -inf is measured.
"""

from mosaic.kernels.cuda.shared.launching import tl, triton

LAST = tl.constexpr(0x7FFFFFFF)
"""Stands for no column."""
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _base(maximum):
    return tl.maximum(maximum, -1e38) * _LOG2E


@triton.jit
def rebase(maximum, new_maximum, total, weighted):
    """Measure the sums [R] from a new maximum; return its base, then the sums."""
    base = _base(new_maximum)
    shift = tl.maximum(maximum * _LOG2E - base, -200.0)
    scale = tl.exp2(shift)
    return base, total * scale, (weighted + total * shift) * scale


@triton.jit
def exponentials(logits, base, total, weighted):
    """Add a tile [R, W] of float32 logits, -inf where masked, to the sums."""
    shifted = tl.maximum(logits * _LOG2E - base[:, None], -200.0)
    exponential = tl.exp2(shifted)
    return total + tl.sum(exponential, 1), weighted + tl.sum(exponential * shifted, 1)


@triton.jit
def join(maximum, total, weighted):
    """Join the states [R, P] of the parts of a row: the maximum and the two sums, [R]."""
    joined = tl.max(maximum, 1)
    _, total, weighted = rebase(maximum, joined[:, None], total, weighted)
    return joined, tl.sum(total, 1), tl.sum(weighted, 1)


@triton.jit
def finish(maximum, total, weighted):
    """Turn the sums into log-sum-exp and entropy."""
    log_total = tl.log(total)
    return maximum + log_total, log_total - weighted / total * _LN2
