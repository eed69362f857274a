"""score_keys: the products of the mean query of a block with every key of its sequence, per set of query heads.

The formula is that of the operator's record (`mosaic.registrar.operators.score_keys`; dLLM-Serve, equation 6). Float32 inside
(float64 for float64). Legend: T rows, B sequences, N query heads, K KV heads, H size, M heads of a set.
"""

from itertools import pairwise

import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.scratch import beginning, tiles_of


def bind(
    *, q: Tensor, k: Tensor, spans: Tensor, cu_seqlens: Tensor, scores: Tensor, head_size: int, each: int, over: str = "max",
    scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write the scores [each*K, T]; spans and bounds are read on the host."""
    total, mean, rows, column, rounded = tiles_of("score_keys", scratch, {"q": q}, head_size=head_size)
    of_both = torch.add if over == "mean" else torch.maximum
    heads, kv_heads = q.shape[1] // head_size, k.shape[1] // head_size
    group = heads // kv_heads
    members = group // each
    q_TNH, k_TKH, width = q.view(-1, heads, head_size), k.view(-1, kv_heads, head_size), rows.shape[0]

    def run() -> None:
        bounds = zip(pairwise(cu_seqlens.tolist()), spans.tolist(), strict=True)
        for (start, end), (first, last, *_) in bounds:
            for head in range(heads if end > start else 0):
                mean.zero_()
                for at in range(start + first, start + last, width):
                    some = q_TNH[at : min(at + width, start + last), head]
                    torch.sum(beginning(rows, some.shape).copy_(some), 0, out=total)
                    mean.add_(total)
                share = 1.0 / ((last - first) * (members if over == "mean" else 1))
                for at in range(start, end, width):
                    keys = k_TKH[at : min(at + width, end), head // group]
                    products, mine = column[: len(keys)], scores[head // members, at : at + len(keys)]
                    torch.addmv(
                        products, beginning(rows, keys.shape).copy_(keys), mean, beta=0, alpha=share, out=products
                    )
                    if head % members == 0:
                        mine.copy_(products)
                    else:
                        of_both(mine, beginning(rounded, mine.shape).copy_(products), out=mine)

    return run


launch = launcher(bind)


def reference(
    *, q: Tensor, k: Tensor, spans: Tensor, cu_seqlens: Tensor, head_size: int, each: int, over: str = "max"
) -> Tensor:  # fmt: skip
    """Return the scores in plain PyTorch; columns of rows in no sequence are NaN."""
    heads, kv_heads = q.shape[1] // head_size, k.shape[1] // head_size
    sets = each * kv_heads
    scores = torch.full((sets, q.shape[0]), float("nan"), dtype=q.dtype)
    for (start, end), (first, last, *_) in zip(pairwise(cu_seqlens.tolist()), spans.tolist(), strict=True):
        if start == end:
            continue
        mean_NH = q[start + first : start + last].view(-1, heads, head_size).mean(0)
        k_SNH = k[start:end].view(-1, kv_heads, head_size).repeat_interleave(heads // kv_heads, 1)
        found = torch.einsum("nh,snh->ns", mean_NH, k_SNH).view(sets, heads // sets, -1)
        scores[:, start:end] = found.mean(1) if over == "mean" else found.amax(1)
    return scores
