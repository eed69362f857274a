"""prefix_logsumexp: the log-sum-exp of each voting row's scores over its prefix.

The formula is that of the operator's record (`mosaic.registrar.operators.prefix_logsumexp`). Online over tiles of keys,
in float32 (float64 for float64). Legend: T rows, R rows of the state, L layers, B sequences, X extents, N query heads,
K KV heads, H size, A rows times heads of a tile.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mosaic.kernels.key_mass import scores_of, tiles_of_keys
from mosaic.kernels.shared.attention import tile_shape
from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.extents import kept_tokens, pieces, windows
from mosaic.kernels.shared.scratch import beginning, tiles_of


def bind(
    *, q: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, captured: Tensor, votes: Tensor, cu_seqlens: Tensor,
    logsumexp: Tensor, layer: int, kv_heads: int, head_size: int, scale: float, span: int = 0, keys: int = 0,
    scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write the log-sum-exps of voting rows into logsumexp [T, N]; lengths, extents and votes are read on the host."""
    group = q.shape[1] // (kv_heads * head_size)
    query, scores, *tiles = tiles_of("prefix_logsumexp", scratch, {"q": q}, head_size=head_size)
    vectors, wide = tiles[:5], tiles[5:]
    q_KTGH = q.view(q.shape[0], kv_heads, group, head_size).transpose(0, 1)
    sums_KTG = logsumexp.view(q.shape[0], kv_heads, group).transpose(0, 1)

    def run() -> None:
        owned, counts = pieces(extents, cu_extents), captured.tolist()
        for sequence, start, end in windows(cu_seqlens, 0, q.shape[0]):
            prefix, voters = counts[sequence], votes[start:end].tolist()
            if not prefix or not any(voters):
                continue
            rows, width = tile_shape(prefix, in_place=False)
            most = min(group, rows)
            tokens = rows // most
            for head in range(kv_heads):
                kept = [
                    (piece.start, kept_tokens(kv, piece, layer, kv_heads, head_size)[0, head])
                    for piece in owned[sequence]
                ]
                for member in range(0, group, most):
                    for at in range(0, end - start, tokens):
                        if any(voters[at : at + tokens]):
                            tile = slice(start + at, min(start + at + tokens, end)), slice(member, member + most)
                            part = q_KTGH[head][tile]
                            packed = beginning(query, part.shape).copy_(part).flatten(0, 1)
                            found = _log_sums(packed, tiles_of_keys(kept, prefix, width, wide), scale, scores, vectors)
                            sums_KTG[head][tile].copy_(found.view(part.shape[:2]))

    return run


launch = launcher(bind)


def _log_sums(
    q_AH: Tensor, key_tiles: Iterator[tuple[int, Tensor]], scale: float, scores: Tensor, vectors: Sequence[Tensor]
) -> Tensor:
    """The log-sum-exp of each row's scores, online, in one of the vectors."""
    rows = q_AH.shape[0]
    maximum, new_maximum, total, tile_total, correction = (vector[:rows] for vector in vectors)
    maximum.fill_(float("-inf"))
    total.zero_()
    for _, keys in key_tiles:
        s = scores_of(q_AH, keys, scale, scores)
        torch.amax(s, dim=1, out=new_maximum)
        torch.maximum(new_maximum, maximum, out=new_maximum)
        torch.sub(maximum, new_maximum, out=correction)
        correction.exp_()
        s.sub_(new_maximum.unsqueeze(1)).exp_()
        torch.sum(s, dim=1, out=tile_total)
        total.mul_(correction).add_(tile_total)
        maximum.copy_(new_maximum)
    return total.log_().add_(maximum)


def reference(
    *, q: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, captured: Tensor, votes: Tensor, cu_seqlens: Tensor, layer: int,
    kv_heads: int, head_size: int, scale: float, span: int = 0, keys: int = 0,
) -> Tensor:  # fmt: skip
    """Return the log-sum-exps in plain PyTorch, with whole score matrices; those of rows that do not vote are NaN."""
    found = torch.full((q.shape[0], q.shape[1] // head_size), float("nan"), dtype=q.dtype)
    owned = pieces(extents, cu_extents)
    for sequence, start, end in windows(cu_seqlens, 0, q.shape[0]):
        prefix, voters = int(captured[sequence]), votes[start:end] != 0
        if prefix:
            kept = [kept_tokens(kv, piece, layer, kv_heads, head_size)[0] for piece in owned[sequence]]
            k_KPH = torch.cat(kept, dim=1)[:, :prefix]
            q_KTGH = q[start:end][voters].view(-1, kv_heads, found.shape[1] // kv_heads, head_size).transpose(0, 1)
            sums_KTG = torch.logsumexp(q_KTGH @ k_KPH.transpose(1, 2)[:, None] * scale, dim=3)
            found[start:end][voters] = sums_KTG.transpose(0, 1).flatten(1)
    return found
