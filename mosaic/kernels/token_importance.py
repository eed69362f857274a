"""token_importance: the attention of each sequence's voting rows to the positions of its block, per KV head.

The formula is that of the operator's record (`mosaic.registrar.operators.token_importance`; FOCUS, equations 2 and 15).
Sums are in float32 (float64 for float64). Legend: T rows, R rows of the state, L layers, B sequences, X extents, N
query heads, K KV heads, H size, P positions of a block, A rows times heads of a tile.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mosaic.kernels.key_mass import scores_of
from mosaic.kernels.shared.binding import Run, launcher
from mosaic.kernels.shared.extents import Piece, kept_tokens, pieces
from mosaic.kernels.shared.scratch import beginning, tiles_of


def bind(
    *, q: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, cu_seqlens: Tensor, votes: Tensor, first: Tensor,
    listed: Tensor, importance: Tensor, layer: int, kv_heads: int, head_size: int, scale: float, pool: int = 3,
    scratch: Tensor | None = None,
) -> Run:  # fmt: skip
    """Write the importance of each sequence's positions, [B, K, P]; extents, votes and lists are read on the host."""
    group = q.shape[1] // (kv_heads * head_size)
    query, keys, scores, pooled, row, column, total = tiles_of(
        "token_importance", scratch, {"q": q, "listed": listed}, head_size=head_size
    )
    q_KTGH = q.view(q.shape[0], kv_heads, group, head_size).transpose(0, 1)
    most, sums, written = min(group, query.shape[0]), total.numpy(), importance.numpy()

    def run() -> None:
        importance.zero_()
        owned, voting, begins, offsets = pieces(extents, cu_extents), votes.tolist(), first.tolist(), listed.tolist()
        for sequence, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
            mine = [offset for offset in offsets[sequence] if offset >= 0]
            voters = list(_runs([at for at in range(start, end) if voting[at]]))
            if not mine or not voters:
                continue
            places = list(_places(owned[sequence], [begins[sequence] + offset for offset in mine]))
            k_PH = keys[: len(mine)]
            for head in range(kv_heads):
                for at, piece, low, high in places:
                    k_PH[at : at + high - low].copy_(
                        kept_tokens(kv, piece, layer, kv_heads, head_size)[0, head, low:high]
                    )
                total.zero_()
                for low, high in voters:
                    for member in range(0, group, most):
                        for token in range(low, high, query.shape[0] // most):
                            tile = slice(token, min(token + query.shape[0] // most, high)), slice(member, member + most)
                            part = q_KTGH[head][tile]
                            packed = beginning(query, part.shape).copy_(part).flatten(0, 1)
                            _add(scores_of(packed, k_PH, scale, scores), pool // 2, pooled, row, column, total)
                written[sequence, head, mine] = sums[: len(mine)]

    return run


launch = launcher(bind)


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending rows as ranges [start, end)."""
    start = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or rows[at] != rows[at - 1] + 1:
            yield rows[start], rows[at - 1] + 1
            start = at


def _places(owned: Sequence[Piece], positions: Sequence[int]) -> Iterator[tuple[int, Piece, int, int]]:
    """Where keys of ascending positions lie, neighbours together: the first one's number, the piece, and a range of its tokens."""
    for piece in owned:
        inside = [position for position in positions if piece.start <= position < piece.end]
        for low, high in _runs(inside):
            yield positions.index(low), piece, low - piece.start, high - piece.start


def _add(s: Tensor, reach: int, pooled: Tensor, row: Tensor, column: Tensor, total: Tensor) -> None:
    """Add softmax(maximum over `reach` neighbours on each side) of scores [A, P] to what the rows add up to."""
    rows, count = s.shape
    p, found, highest = beginning(pooled, s.shape).copy_(s), column[:count], row[:rows]
    for shift in range(1, min(reach, count - 1) + 1):
        torch.maximum(p[:, shift:], s[:, :-shift], out=p[:, shift:])
        torch.maximum(p[:, :-shift], s[:, shift:], out=p[:, :-shift])
    torch.amax(p, dim=1, out=highest)
    p.sub_(highest.unsqueeze(1)).exp_()
    torch.sum(p, dim=1, out=highest)
    p.div_(highest.unsqueeze(1))
    torch.sum(p, dim=0, out=found)
    total[:count].add_(found)


def reference(
    *, q: Tensor, kv: Tensor, extents: Tensor, cu_extents: Tensor, cu_seqlens: Tensor, votes: Tensor, first: Tensor,
    listed: Tensor, layer: int, kv_heads: int, head_size: int, scale: float, pool: int = 3,
) -> Tensor:  # fmt: skip
    """Return the importance in plain PyTorch, with whole score matrices."""
    sequences, positions = listed.shape
    found = torch.zeros(sequences, kv_heads, positions, dtype=q.dtype)
    owned = pieces(extents, cu_extents)
    for sequence, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        offsets, voters = listed[sequence][listed[sequence] >= 0].long(), votes[start:end] != 0
        if len(offsets) and voters.any():
            kept = [kept_tokens(kv, piece, layer, kv_heads, head_size)[0] for piece in owned[sequence]]
            k_KPH = torch.cat(kept, dim=1)[:, int(first[sequence]) + offsets]
            q_KAH = q[start:end][voters].view(-1, kv_heads, q.shape[1] // kv_heads // head_size, head_size)
            s_KAP = q_KAH.permute(1, 0, 2, 3).flatten(1, 2) @ k_KPH.transpose(1, 2) * scale
            p_KAP = torch.max_pool1d(s_KAP, pool, stride=1, padding=pool // 2).softmax(2)
            found[sequence][:, offsets] = p_KAP.sum(1)
    return found
