"""query_change: the relative change of each sequence's queries since they were kept; refreshed ones are kept anew.

The operator's record defines both (`mosaic.registrar.operators.query_change`; FlashBlock, LoSA). Sums are in float32
(float64 for float64). Legend: T query rows, C columns, E owners, M rows of a block, B sequences.
"""

from itertools import pairwise

import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.scratch import tiles_of


def bind(
    *, q: Tensor, kept: Tensor, owner: Tensor, prefix: Tensor, cu_seqlens: Tensor, positions: Tensor, change: Tensor, rows: int,
    refreshed: Tensor | None = None, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write the changes into change [B], and new queries into their rows of kept [E, M*C]; lengths are read on the host."""
    wide, other, sums = tiles_of("query_change", scratch, {"q": q})
    kept_EMC = kept.view(kept.shape[0], rows, q.shape[1])
    difference, magnitude, part = sums.unbind()

    def run() -> None:
        owners, prefixes, at = owner.tolist(), prefix.tolist(), positions.tolist()
        new = [0] * len(owners) if refreshed is None else refreshed.tolist()
        for sequence, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
            before, mine = prefixes[sequence], kept_EMC[owners[sequence]]
            difference.zero_()
            magnitude.zero_()
            for row in range(start, end) if before else ():
                if not new[sequence]:
                    earlier = other.copy_(mine[at[row] - before])
                    magnitude.add_(torch.sum(torch.mul(earlier, earlier, out=wide), 0, out=part))
                    earlier.sub_(wide.copy_(q[row]))
                    difference.add_(torch.sum(earlier.square_(), 0, out=part))
                elif at[row] >= before:
                    mine[at[row] - before].copy_(q[row])
            # where nothing differs, nothing was divided by nothing
            change[sequence].copy_(difference.div_(magnitude).sqrt_() if float(difference) else difference)

    return run


launch = launcher(bind)


def reference(
    *, q: Tensor, kept: Tensor, owner: Tensor, prefix: Tensor, cu_seqlens: Tensor, positions: Tensor, rows: int,
    refreshed: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the changes and the state in plain PyTorch."""
    kept, change = kept.clone(), torch.zeros(len(owner), dtype=q.dtype)
    for sequence, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        mine, before = kept[owner[sequence]].view(rows, -1), int(prefix[sequence])
        places = positions[start:end].long() - before
        if before and refreshed is not None and refreshed[sequence]:
            mine[places[places >= 0]] = q[start:end][places >= 0]
        elif before and start < end and not torch.equal(q[start:end], mine[places]):
            change[sequence] = (q[start:end] - mine[places]).norm() / mine[places].norm()
    return {"change": change, "kept": kept}
