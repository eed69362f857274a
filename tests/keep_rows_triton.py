"""A kernel as a user may write it: keep the rows whose first column is above a limit, in their order."""

import triton
import triton.language as tl


@triton.jit
def keep_rows(x, limit, kept, count, n, W: tl.constexpr, B: tl.constexpr):
    """One program walks over all rows, 32 at a time."""
    bound = tl.load(limit)
    columns = tl.arange(0, W)
    total = 0
    for start in range(0, n, B):
        rows = start + tl.arange(0, B)
        chosen = (tl.load(x + rows * W, mask=rows < n, other=float("-inf")) > bound) & (rows < n)
        places = total + tl.cumsum(chosen.to(tl.int32), 0) - 1
        values = tl.load(x + rows[:, None] * W + columns[None, :], mask=chosen[:, None], other=0.0)
        tl.store(kept + places[:, None] * W + columns[None, :], values, mask=chosen[:, None])
        total += tl.sum(chosen.to(tl.int32), 0)
    tl.store(count, total.to(tl.int64))
