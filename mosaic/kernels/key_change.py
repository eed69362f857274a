"""key_change: how far the keys of each sequence's window are from those that are kept for its positions.

`mosaic.registrar.operators.key_change` defines it. Sums are in float32 (float64 for float64). Legend: T rows, K KV heads, H size,
R rows of the state, L layers, B sequences, X extents.
"""

import torch
from torch import Tensor

from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.extents import kept_tokens, pieces, windows
from mosaic.kernels.shared.scratch import tiles_of


def bind(
    *, k: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, cu_seqlens: Tensor, positions: Tensor, change: Tensor,
    layer: int, head_size: int, scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write the changes [B]; bounds, positions and extents are read on the host."""
    wide, other, sums = tiles_of("key_change", scratch, {"k": k})
    heads = k.shape[1] // head_size
    wide_KH, other_KH = (tile.view(heads, head_size) for tile in (wide, other))
    difference, magnitude, part = sums.unbind()

    def run() -> None:
        owned, at = pieces(extents, cu_extents), positions.tolist()
        change.zero_()
        for sequence, start, end in windows(cu_seqlens, 0, k.shape[0]):
            difference.zero_()
            magnitude.zero_()
            for row in range(start, end):
                for piece in owned[sequence]:
                    if not piece.start <= at[row] < piece.end:
                        continue
                    kept = kept_tokens(kv, piece, layer, heads, head_size)[0, :, at[row] - piece.start]
                    other_KH.copy_(kept)
                    magnitude.add_(torch.sum(torch.mul(other, other, out=wide), 0, out=part))
                    wide_KH.copy_(k[row].view(heads, head_size))
                    difference.add_(torch.sum(other.sub_(wide).square_(), 0, out=part))
            # where nothing differs, nothing was divided by nothing
            change[sequence].copy_(difference.div_(magnitude).sqrt_() if float(difference) else difference)

    return run


launch = launcher(bind)


def reference(
    *, k: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, cu_seqlens: Tensor, positions: Tensor, layer: int, head_size: int
) -> Tensor:  # fmt: skip
    """Return the changes in plain PyTorch."""
    change, heads = torch.zeros(len(cu_seqlens) - 1, dtype=k.dtype), k.shape[1] // head_size
    owned = pieces(extents, cu_extents)
    for sequence, start, end in windows(cu_seqlens, 0, k.shape[0]):
        pairs = [
            (
                k[row],
                kept_tokens(kv, piece, layer, heads, head_size)[0, :, int(positions[row]) - piece.start].reshape(-1),
            )
            for row in range(start, end)
            for piece in owned[sequence]
            if piece.start <= int(positions[row]) < piece.end
        ]
        if pairs and any(not torch.equal(new, old) for new, old in pairs):
            new, old = (torch.stack(side).to(k.dtype) for side in zip(*pairs, strict=True))
            change[sequence] = (new - old).norm() / old.norm()
    return change
